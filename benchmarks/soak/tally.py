"""The outcomes of a soak so far: each beside the one that was expected, and each unexpected one in words."""

import msgspec

MOST_SHOWN = 50


class SoakTally(msgspec.Struct, kw_only=True):
    """Outcomes by what was done and what came, as `"name -> seen"`. `failures` are those that were not expected.

    `num_turns` are the chats that were answered, or given up on purpose; `num_kept` those that sessions kept.
    """

    num_turns: int = 0
    num_kept: int = 0
    num_sessions: int = 0
    num_generations: int = 0
    num_ids_checked: int = 0
    outcomes: dict[str, dict[str, int]] = {}
    num_failures: int = 0
    failures: list[str] = []

    def saw(self, name: str, seen: str) -> None:
        """An outcome that was expected."""
        self._count(name, seen)

    def failed(self, name: str, where: str, what: str) -> None:
        """Something that must not be. `where` is the turn, which begins with the seed."""
        self._count(name, "UNEXPECTED")
        self.num_failures += 1
        if len(self.failures) < MOST_SHOWN:
            self.failures.append(f"{where} ({name}): {what}")

    def _count(self, name: str, seen: str) -> None:
        times = self.outcomes.setdefault(name, {})
        times[seen] = times.get(seen, 0) + 1
