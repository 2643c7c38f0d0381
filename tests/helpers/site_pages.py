"""What a page of the site has: links and where they lead, images, its title."""

from __future__ import annotations

from collections.abc import Mapping
from html.parser import HTMLParser
from pathlib import Path
from urllib.parse import unquote, urlsplit


class Page(HTMLParser):
    """A page as it was read.

    title          of the window
    links          targets of links and sources of pictures, scripts and styles
    anchors        what a link can lead to inside of it
    images         attributes of each picture
    is_for_phones  whether it asks for the width of the device
    """

    def __init__(self, text: str) -> None:
        super().__init__()
        self.title, self.is_for_phones = "", False
        self.links: list[str] = []
        self.images: list[dict[str, str | None]] = []
        self.anchors: set[str | None] = set()
        self._is_in_title = False
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        given = dict(attrs)
        self.anchors |= {given[key] for key in ("id", "name") if key in given}
        self.links += [link for key in ("href", "src") if (link := given.get(key))]
        self.is_for_phones |= tag == "meta" and given.get("name") == "viewport"
        self._is_in_title |= tag == "title"
        if tag == "img":
            self.images.append(given)

    def handle_endtag(self, tag: str) -> None:
        self._is_in_title &= tag != "title"

    def handle_data(self, data: str) -> None:
        self.title += data if self._is_in_title else ""


def broken_links(site: Mapping[Path, Page]) -> list[str]:
    """Links of the pages to files that are not there, and to parts that a page does not have."""
    broken = []
    for path, page in site.items():
        for link in page.links:
            address = urlsplit(link)
            if address.scheme or address.netloc:
                continue
            target = path
            if address.path:
                target = Path(path.parent, unquote(address.path)).resolve()
            anchor = unquote(address.fragment)
            is_known = target not in site or not anchor or anchor in site[target].anchors
            if not target.exists() or not is_known:
                broken.append(f"{path.name}: {link}")
    return broken
