"""What the user should know of how chunks get made, each thing said once."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable

from optuna_fleet.pipeline import limits
from optuna_fleet.pipeline.pipeline_messages import ChunkError
from optuna_fleet.pipeline.spec import PipelineSpec

_MOST_NAMED = 10  # samples that were skipped


class Notices:
    """Says what the pipeline does that the user might not expect, and what it costs.

    Attributes:
        outbox: Sentences for the user; the server empties it.
    """

    def __init__(self, memory_bytes: int, spec: PipelineSpec) -> None:
        self.outbox: list[str] = []
        self._memory_bytes = memory_bytes
        self._spec = spec
        self._told: set[tuple[str, str]] = set()
        self._made: Counter[str] = Counter()
        self._busy_s: dict[str, float] = {}

    def count(self, name: str, num_samples: int, busy_s: float) -> None:
        """Notes what it took to make a chunk of a data set."""
        self._made[name] += num_samples
        self._busy_s[name] = self._busy_s.get(name, 0.0) + busy_s

    def skipped(self, name: str, indices: tuple[int, ...], complaint: ChunkError) -> None:
        """Samples raised, and others took their places."""
        named = [*map(str, indices[:_MOST_NAMED]), *["..."] * (len(indices) > _MOST_NAMED)]
        self._once(
            ("skipped", name),
            f"Skipped sample(s) {', '.join(named)} of data set {name!r}; "
            f"others take their places. More of them are only counted. {complaint.text()}",
        )

    def repeated(self, name: str) -> None:
        """A chunk was made that had been made before."""
        each_s = self._each_s(name)
        dataset = self._spec.dataset(name)
        self._once(
            ("repeated", name),
            f"The preprocessed epochs of data set {name!r} that are in use do not fit into "
            f"{self._memory_bytes >> 20} MiB: what was dropped is preprocessed again, at "
            f"{1e3 * each_s:.3g} ms of a core per sample, up to "
            f"{each_s * dataset.num_samples:.3g} s per epoch for each group of trials of a like "
            "pace. A larger memory_bytes, or a spill_dir with more room, would avoid that.",
        )

    def decoded_full(self, name: str, kept_share: Callable[[], float]) -> None:
        """The decoded store is full, and keeps a share of the samples."""
        if ("decoded", name) in self._told or (share := kept_share()) == 1:
            return
        each_s, room = self._each_s(name), self._memory_bytes // limits.DECODED_PART
        others = (1 - share) * self._spec.dataset(name).num_samples
        self._once(
            ("decoded", name),
            f"The decoded store has room for about {share:.0%} of the samples of data set "
            f"{name!r}, in {room >> 20} MiB. The others are read and decoded in every epoch, at "
            f"up to {1e3 * each_s:.3g} ms of a core each, "
            f"{each_s * others:.3g} s per epoch. A larger memory_bytes, of which it has a part, "
            "would avoid that.",
        )

    def unseeded(self, name: str) -> None:
        """A sample came out otherwise when it was made again."""
        self._once(
            ("unseeded", name),
            f"A sample of data set {name!r} came out otherwise when it was made again, so that "
            "no seed repeats the results: take random numbers from torch's, NumPy's or Python's "
            "global functions, or from a generator that each __getitem__ makes anew, as by "
            "np.random.default_rng(torch.initial_seed()), and keep nothing that changes from one "
            "sample to the next.",
        )

    def unmeasured(self, name: str) -> None:
        """The size of samples is guessed here, and perhaps measured on other nodes."""
        self._once(
            ("unmeasured", name),
            f"The first samples of data set {name!r} could not be made on this node, so that "
            "their size is guessed. Nodes that could make them share none of its samples with "
            "this one.",
        )

    def unstarted(self, error: OSError) -> None:
        """A preprocessor could not be started."""
        self._once(
            ("unstarted", ""),
            f"A preprocessor can't be started ({error}); this is tried again. See the limits on "
            "processes and open files: ulimit -u, ulimit -n, pids.max of the control group.",
        )

    def _each_s(self, name: str) -> float:
        return self._busy_s.get(name, 0.0) / max(1, self._made[name])

    def _once(self, what: tuple[str, str], text: str) -> None:
        if what not in self._told:
            self._told.add(what)
            self.outbox.append(text)
