"""Links between network namespaces with delay, loss and limited bandwidth: one interface, two backends.

`netem` shapes a pair of virtual Ethernet devices in the kernel. Where the kernel does not have it, a userspace process
carries IP packets between two TUN devices and delays, drops and holds them back by itself. Both ends keep their own
real TCP.
"""
