"""A verdict as one HTML page that needs nothing else: no network, no other file."""

import base64
import hashlib
import json
from collections.abc import Mapping
from importlib import resources
from pathlib import Path
from typing import Any


def write_report(verdict: Mapping[str, Any], path: str | Path) -> None:
    """Write the page.

    Args:
        verdict: what ``Verdict.to_dict`` gives.
        path: the file, which is replaced.
    """
    files = resources.files("flax_transformer.parity")
    page, style, script = (
        files.joinpath(f"report.{kind}").read_text(encoding="utf-8") for kind in ("html", "css", "js")
    )
    # The browser runs this script and no other, whatever the names of modules and parameters may be.
    policy = f"default-src 'none'; base-uri 'none'; style-src '{_digest(style)}'; script-src '{_digest(script)}'"
    # "<" ends no script element where it is written as an escape of JSON.
    content = json.dumps(verdict, allow_nan=False).replace("<", "\\u003c")
    page = page.replace("{{policy}}", policy).replace("{{style}}", style).replace("{{script}}", script)
    Path(path).write_text(page.replace("{{verdict}}", content), encoding="utf-8")


def _digest(text: str) -> str:
    return "sha256-" + base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()
