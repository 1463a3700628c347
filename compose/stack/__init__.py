"""Apache Kafka on this machine: JVM processes from pinned jars, with no container and no service manager."""
