"""Settings of the page."""

from __future__ import annotations

import ipaddress

from pydantic import Field, SecretStr, model_validator

from tidemill.schemas.config import HttpSettings, Section

MIN_TOKEN = 16


def is_loopback(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


class ViewSettings(Section):
    """The page on which a run is watched (`tidemill view`)."""

    host: str = "127.0.0.1"
    """Address to listen at. Any other than loopback demands `token` or `behind_proxy`."""

    port: int = Field(default=8126, ge=0, le=65535)
    """Port to listen at; 0 takes a free one."""

    token: SecretStr = SecretStr("")
    """Secret that a browser gives once (the page asks for it), and a script as `Authorization: Bearer`. Empty: none is
    asked for. Better given by the environment than in a file."""

    behind_proxy: bool = False
    """A proxy in front of the page decides who may see it, so that an address other than loopback needs no token."""

    names: tuple[str, ...] = ()
    """Host names by which browsers reach the page, besides `host` and loopback; any other is refused, so that a foreign
    site cannot point its own name here."""

    model: str = ""
    """Directory of the model whose tokenizer shows token ids as text. Empty: token ids are shown as numbers."""

    refresh_s: float = Field(default=3.0, ge=0.5)
    """Seconds between two readings of what a browser shows, while somebody looks."""

    query_seconds: float = Field(default=10.0, gt=0)
    """Longest a query of the page may run, in seconds."""

    query_memory_bytes: int = Field(default=2**30, ge=2**20)
    """Most memory that a query of the page may take."""

    result_rows: int = Field(default=5_000, ge=1)
    """Rows of an answer in Ask that are shown at most."""

    http: HttpSettings = HttpSettings()
    """Limits of the server on its clients' connections."""

    @model_validator(mode="after")
    def _guarded(self) -> ViewSettings:
        token = self.token.get_secret_value()
        if token and len(token) < MIN_TOKEN:
            raise ValueError(f"view.token needs at least {MIN_TOKEN} characters")
        if not (is_loopback(self.host) or token or self.behind_proxy):
            raise ValueError(
                f"view.host {self.host!r} can be reached from other machines: set view.token to a secret "
                "(TIDEMILL_VIEW__TOKEN), or view.behind_proxy=true where a proxy decides who may see the page"
            )
        return self
