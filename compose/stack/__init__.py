"""Apache Kafka on this machine: JVM processes from pinned jars, with no container and no service manager."""

from tidemill.compose.stack.config import MissingTool, StackError, StackSettings
from tidemill.compose.stack.kafka import LocalStack, StackStatus, local_bootstrap, require_tools

__all__ = [
    "LocalStack",
    "MissingTool",
    "StackError",
    "StackSettings",
    "StackStatus",
    "local_bootstrap",
    "require_tools",
]
