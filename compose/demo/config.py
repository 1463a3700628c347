"""Settings of the demonstration."""

from __future__ import annotations

from pathlib import Path

from pydantic import Field

from tidemill.schemas.config import Section


class DemoSettings(Section):
    """How `tidemill demo` runs the loop."""

    data_dir: Path = Path("data/demo")
    """Each demonstration keeps its log, store, tables and role logs in a directory of its own below this one."""

    model: str = ""
    """Directory of a Hugging Face causal model to start from. Empty: mid-train a tiny one from nothing."""

    replicas: int = Field(default=1, ge=1)
    """vLLM replicas to run."""

    workers: int = Field(default=1, ge=1)
    """Rollout workers to run."""

    start_timeout_s: float = Field(default=180.0, gt=0)
    """How long a role may take to start."""

    stall_timeout_s: float = Field(default=180.0, gt=0)
    """The demonstration is given up when nothing at all happens in the log for this long."""
