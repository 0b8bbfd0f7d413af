"""The page at `/`: one file without a build step, which talks to this server alone."""

from __future__ import annotations

import base64
import functools
import hashlib
import importlib.resources
import re

import fastapi
from fastapi.responses import Response

router = fastapi.APIRouter()
PATH = "/"


@router.get(PATH, include_in_schema=False)
async def page() -> Response:
    """A chat that shows how each token came. docs/serving.md."""
    text, headers = _page()
    return Response(text, media_type="text/html", headers=headers)


@functools.cache
def _page() -> tuple[str, dict[str, str]]:
    """The page and its headers: the browser runs its own script and style, and loads nothing."""
    folder = importlib.resources.files("dflash_jax") / "assets" / "page"
    text = (folder / "index.html").read_text(encoding="utf-8")
    policy = (
        "default-src 'none'; connect-src 'self'; img-src data:; base-uri 'none'; "
        "form-action 'none'; frame-ancestors 'none'; "
        f"script-src {_hash(text, 'script')}; style-src {_hash(text, 'style')}"
    )
    return text, {
        "Content-Security-Policy": policy,
        "X-Content-Type-Options": "nosniff",
        "Referrer-Policy": "no-referrer",
        "Cache-Control": "no-cache",
    }


def _hash(text: str, element: str) -> str:
    """A CSP source for the page's one inline script or style."""
    (inside,) = re.findall(f"<{element}>(.*?)</{element}>", text, re.DOTALL)
    digest = base64.b64encode(hashlib.sha256(inside.encode()).digest()).decode()
    return f"'sha256-{digest}'"
