"""A hook of mkdocs.yml: links from docs/ to other files of the repository lead to the place of its source.

Without a SOURCE_URL, as in `make docs`, the text of such a link stays and the link goes.
"""

from __future__ import annotations

import posixpath
import re
from typing import Any

LINK = re.compile(r"\[([^\]]+)\]\(((?:\.\./)+[^)]+)\)")


def on_page_markdown(markdown: str, *, page: Any, config: Any, files: Any) -> str:
    """The text of a page with the links of the site."""
    folder = posixpath.dirname(page.file.src_uri)

    def replaced(link: re.Match[str]) -> str:
        path = posixpath.normpath(posixpath.join("docs", folder, link[2]))
        if path.startswith("docs/"):
            return link[0]
        source = config.extra["source"]
        return f"[{link[1]}]({source}/{path})" if source else link[1]

    return LINK.sub(replaced, markdown)
