"""Pages of keys, and a radix tree of the prefixes that requests have left in them."""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass(eq=False)
class Request:
    """A prompt, and the answer that grows behind it.

    tokens      the first prompt_len are the prompt; at max_len tokens it is done
    num_keys, num_draft_keys   leading tokens whose keys the target and the draft model have
    row         of req_to_token
    pages       that hold its tokens, in order; the leading ones are those of `prefix`
    prefix      pages of the tree that it uses
    """

    tokens: list[int]
    prompt_len: int
    max_len: int
    num_keys: int = 0
    num_draft_keys: int = 0
    row: int = 0
    pages: list[int] = field(default_factory=list)
    prefix: list[Node] = field(default_factory=list)


@dataclass(eq=False)
class Node:
    """A page in the tree, behind that of its parent. One without users and children may go."""

    page: int
    tokens: tuple[int, ...] = ()
    parent: Node | None = None
    children: dict[tuple[int, ...], Node] = field(default_factory=dict)
    users: int = 0


class Pages:
    """All pages but page 0, where tokens that pad a batch are written."""

    def __init__(self, num_pages: int, page_size: int) -> None:
        self.page_size, self.free = page_size, list(range(num_pages - 1, 0, -1))
        self.root, self.nodes = Node(0), dict[Node, None]()  # least recently used first

    def admit(self, request: Request, num_tokens: int) -> bool:
        """Give a request pages for num_tokens, if there are enough; a known prefix comes first."""
        # The last token of a prompt is always computed, since its logits are wanted.
        node = self.root
        for index in range((request.prompt_len - 1) // self.page_size):
            if (key := self._key(request, index)) not in node.children:
                break
            node = node.children[key]
            node.users += 1
            request.prefix.append(node)
        missing = -(-num_tokens // self.page_size) - len(request.prefix)
        while len(self.free) < missing:
            if not self._evict():
                self._leave(request)
                return False
        own = [self.free.pop() for _ in range(missing)]
        request.pages = [node.page for node in request.prefix] + own
        request.num_keys = request.num_draft_keys = len(request.prefix) * self.page_size
        return True

    def share(self, request: Request) -> None:
        """Put a request's pages into the tree, as far as both models' keys fill them."""
        num_keys = min(request.num_keys, request.num_draft_keys)
        for index in range(len(request.prefix), num_keys // self.page_size):
            parent = request.prefix[-1] if request.prefix else self.root
            if (key := self._key(request, index)) in parent.children:
                return  # another request has computed the same page meanwhile
            node = parent.children[key] = Node(request.pages[index], key, parent, users=1)
            request.prefix.append(node)
            self.nodes[node] = None

    def release(self, request: Request) -> None:
        """Take back a request's pages. Those in the tree stay until their room is needed."""
        self.share(request)
        self.free += request.pages[len(request.prefix) :]
        self._leave(request)

    def _key(self, request: Request, index: int) -> tuple[int, ...]:
        return tuple(request.tokens[index * self.page_size : (index + 1) * self.page_size])

    def _leave(self, request: Request) -> None:
        for node in request.prefix:
            node.users -= 1
            self.nodes[node] = self.nodes.pop(node)
        request.prefix, request.pages = [], []

    def _evict(self) -> bool:
        """Free the least recently used page of the tree, if there is one that nobody uses."""
        for node in self.nodes:
            if not node.users and not node.children:
                del self.nodes[node], node.parent.children[node.tokens]
                self.free.append(node.page)
                return True
        return False
