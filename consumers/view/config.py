"""Settings of the web page."""

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
    """The web page for watching a run (`tidemill view`)."""

    host: str = "127.0.0.1"
    """Address to listen on. An address other than loopback requires `token` or `behind_proxy`."""

    port: int = Field(default=8126, ge=0, le=65535)
    """Port to listen on; 0 takes a free one."""

    token: SecretStr = SecretStr("")
    """Secret that a browser sends once (the page asks for it), and a script sends as `Authorization: Bearer`. Empty:
    no token is required. Set it in the environment rather than in a file."""

    behind_proxy: bool = False
    """A proxy in front of the page controls access, so that an address other than loopback needs no token."""

    names: tuple[str, ...] = ()
    """Host names by which browsers reach the page, in addition to `host` and loopback; others are refused, so that a
    foreign site cannot use its own name for this address."""

    model: str = ""
    """Directory of the model whose tokenizer shows token ids as text. Empty: token ids are shown as numbers."""

    refresh_s: float = Field(default=3.0, ge=0.5)
    """Seconds between two updates of the visible page in a browser."""

    query_seconds: float = Field(default=10.0, gt=0)
    """Maximum duration of a query of the page, in seconds."""

    query_memory_bytes: int = Field(default=2**30, ge=2**20)
    """Maximum memory of a query of the page."""

    result_rows: int = Field(default=5_000, ge=1)
    """Maximum rows of a result that Ask shows."""

    http: HttpSettings = HttpSettings()
    """Limits on client connections to the server."""

    @model_validator(mode="after")
    def _guarded(self) -> ViewSettings:
        token = self.token.get_secret_value()
        if token and len(token) < MIN_TOKEN:
            raise ValueError(f"view.token needs at least {MIN_TOKEN} characters")
        if not (token.isascii() and token.isprintable()):
            raise ValueError("view.token must be printable ASCII: the headers that carry it have no other characters")
        if not (is_loopback(self.host) or token or self.behind_proxy):
            raise ValueError(
                f"view.host {self.host!r} can be reached from other machines: set view.token to a secret "
                "(TIDEMILL_VIEW__TOKEN), or view.behind_proxy=true where a proxy decides who may see the page"
            )
        return self
