"""Links between network namespaces with delay, loss and limited bandwidth: one interface, two backends.

`netem` shapes a pair of virtual Ethernet devices in the kernel. If the kernel does not have it, a userspace process
copies IP packets between two TUN devices, and delays, drops and queues them itself. Both ends use their own real TCP.
"""
