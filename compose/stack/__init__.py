"""Apache Kafka on this machine: JVM processes from pinned jars, without a container or a service manager."""
