"""Stop texts: an answer ends before the first of them, whatever its tokens are. Pure."""

from __future__ import annotations

from collections.abc import Sequence


class StopTexts:
    """Finds texts that end an answer. What may be the beginning of one is held back.

    The first stop text is the one that is complete first, the longest of several.
    """

    def __init__(self, texts: Sequence[str]) -> None:
        self._texts = [text for text in texts if text]
        self._held = ""
        self.is_found = False

    def passed(self, text: str, *, is_last: bool) -> str:
        """Return the text before a stop text, as far as that is known; all of it if it is last."""
        if self.is_found:
            return ""
        whole = self._held + text
        places = [(whole.find(stop), len(stop)) for stop in self._texts]
        found = [(begin + length, begin) for begin, length in places if begin >= 0]
        if found:
            self.is_found = True
            return whole[: min(found)[1]]
        held = 0 if is_last else max((_overlap(whole, stop) for stop in self._texts), default=0)
        passed = whole[: len(whole) - held]
        self._held = whole[len(passed) :]
        return passed


def _overlap(text: str, stop: str) -> int:
    """Return how many characters at the end of ``text`` may begin ``stop``."""
    most = min(len(text), len(stop) - 1)
    return next((size for size in range(most, 0, -1) if text.endswith(stop[:size])), 0)
