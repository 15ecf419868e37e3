"""For mkdocs: what lies outside docs/ is no page of the site, so links to it become plain text."""

import re
from typing import Any

_OUTSIDE = re.compile(r"\[([^\]]+)\]\(\.\./[^)]*\)")


def on_page_markdown(markdown: str, **_: Any) -> str:
    """Called by mkdocs with each page."""
    return _OUTSIDE.sub(r"\1", markdown)
