"""What a request gets that cannot be answered: OpenAI's error object."""

from __future__ import annotations

from typing import Any

from rondo.errors import RondoError

_TYPES = {401: "authentication_error", 404: "not_found_error", 429: "rate_limit_error"}


class ApiError(RondoError):
    """status: of the HTTP answer. param: the offending parameter. code: OpenAI's word for it, or ours."""

    def __init__(self, message: str, *, param: str | None = None, code: str = "", status: int = 400) -> None:
        super().__init__(message)
        self.status = status
        self.param = param
        self.code = code or None

    def body(self) -> dict[str, Any]:
        """`{"error": {message, type, param, code}}`."""
        default = "server_error" if self.status >= 500 else "invalid_request_error"
        kind = _TYPES.get(self.status, default)
        return {"error": {"message": str(self), "type": kind, "param": self.param, "code": self.code}}


def refuse(param: str, message: str, code: str = "invalid_value") -> ApiError:
    """A 400 about one parameter."""
    return ApiError(f"{param}: {message}", param=param, code=code)
