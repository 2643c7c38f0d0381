"""Pages of keys, and a radix tree of the prefixes that finished requests have left in them."""

from __future__ import annotations

import itertools
from dataclasses import dataclass, field


@dataclass(eq=False)
class Request:
    """A prompt, and the answer that grows behind it.

    tokens       the prompt and the answer
    row          of req_to_token
    pages        that hold its tokens, in order; those of `prefix` are the tree's
    prefix       nodes of the tree that it uses
    num_keys, num_draft_keys   leading tokens whose keys the target and the draft model have
    num_reused   tokens of the prompt whose keys were there already
    """

    prompt: list[int]
    max_new_tokens: int
    tokens: list[int] = field(default_factory=list)
    row: int = 0
    pages: list[int] = field(default_factory=list)
    prefix: list[Node] = field(default_factory=list)
    num_keys: int = 0
    num_draft_keys: int = 0
    num_reused: int = 0

    def __post_init__(self) -> None:
        self.tokens = self.tokens or list(self.prompt)

    @property
    def answer(self) -> list[int]:
        return self.tokens[len(self.prompt) :]

    @property
    def is_prefilling(self) -> bool:
        return self.num_keys < len(self.prompt)

    @property
    def is_done(self) -> bool:
        return len(self.answer) >= self.max_new_tokens


@dataclass(eq=False)
class Node:
    """A page in the tree: its tokens follow those of its parent.

    users   requests that read the page; only pages without users and children are evicted
    """

    page: int
    tokens: tuple[int, ...]
    parent: Node | None = None
    children: dict[tuple[int, ...], Node] = field(default_factory=dict)
    users: int = 0
    last_use: int = 0


class Pages:
    """All pages but page 0, where the tokens that pad a batch write."""

    def __init__(self, num_pages: int, page_size: int) -> None:
        self.page_size = page_size
        self._free = list(range(num_pages - 1, 0, -1))
        self._root = Node(0, ())
        self._nodes: set[Node] = set()
        self._clock = itertools.count()

    def admit(self, request: Request, num_tokens: int) -> bool:
        """Give a request pages for num_tokens, of which a known prefix comes first. False: there
        are not enough."""
        # At least one token is computed, since its logits are wanted.
        request.prefix = self._match(request.prompt[:-1])
        for node in request.prefix:
            node.users += 1
        missing = -(-num_tokens // self.page_size) - len(request.prefix)
        while len(self._free) < missing and self._evict():
            pass
        if len(self._free) < missing:
            self._unlock(request)
            return False
        own = [self._free.pop() for _ in range(missing)]
        request.pages = [node.page for node in request.prefix] + own
        reused = len(request.prefix) * self.page_size
        request.num_keys = request.num_draft_keys = request.num_reused = reused
        return True

    def share(self, request: Request) -> None:
        """Put whole pages of a request into the tree, once all their keys are final."""
        num_keys = min(request.num_keys, request.num_draft_keys)
        for index in range(len(request.prefix), num_keys // self.page_size):
            parent = request.prefix[-1] if request.prefix else self._root
            key = self._key(request.tokens, index)
            if key in parent.children:
                return  # another request has computed the same page meanwhile
            node = Node(request.pages[index], key, parent, users=1)
            parent.children[key] = node
            request.prefix.append(node)
            self._nodes.add(node)

    def release(self, request: Request) -> None:
        """Take back a request's pages; those in the tree stay until their room is needed."""
        self.share(request)
        self._free += request.pages[len(request.prefix) :]
        self._unlock(request)

    def _match(self, tokens: list[int]) -> list[Node]:
        found, node = [], self._root
        for index in range(len(tokens) // self.page_size):
            child = node.children.get(self._key(tokens, index))
            if child is None:
                break
            found.append(child)
            node = child
        return found

    def _key(self, tokens: list[int], index: int) -> tuple[int, ...]:
        return tuple(tokens[index * self.page_size : (index + 1) * self.page_size])

    def _unlock(self, request: Request) -> None:
        for node in request.prefix:
            node.users -= 1
            node.last_use = next(self._clock)
        request.prefix, request.pages = [], []

    def _evict(self) -> bool:
        """Free the page that was least recently used; False: all are in use."""
        unused = [node for node in self._nodes if not node.users and not node.children]
        if not unused:
            return False
        node = min(unused, key=lambda node: node.last_use)
        assert node.parent is not None
        del node.parent.children[node.tokens]
        self._nodes.remove(node)
        self._free.append(node.page)
        return True
