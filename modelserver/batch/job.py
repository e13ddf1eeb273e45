"""A batch on the disk: what belongs to it, who works on which part, what is answered, and how parts are published.

_manifest.json               the job: its inputs, its options, its shards; at the end its counts
part-00017.jsonl             the answers to a shard, in the order of its rows
errors/part-00017.jsonl      the rows of a shard that failed
_state/00017/claim.2         who works on the shard. The claim of the highest number counts; its holder renews it
_state/00017/2-0001.progress answers under claim 2, so far
_state/00017/2.part          the shard's files, whole, before they are moved to their places; so 2.errors
_state/00017/done            which claim's files are the shard's: made once, after they are whole

All writes are whole, and the only decisions are files that one of several workers can make. A worker that was thought
dead and is not may answer rows again, but cannot publish beside another.
"""

from __future__ import annotations

import hashlib
import os
import re
import secrets
import socket
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from modelserver.batch.formats import Piece
from modelserver.batch.places import Place
from modelserver.errors import InvalidArgumentError

MANIFEST = "_manifest.json"
_STATE = re.compile(r"_state/(\d+)/(?:claim\.(\d+)|(done)|(\d+)-\d+\.progress|(\d+)\.(?:part|errors))")


class Input(msgspec.Struct, frozen=True):
    """A file of the job, with what tells whether it has changed."""

    name: str
    size_bytes: int
    tag: str


class Shard(msgspec.Struct, frozen=True):
    """A piece of the input of that number in the manifest."""

    input: int
    start: int
    end: int
    num_rows: int

    @property
    def piece(self) -> Piece:
        return Piece(self.start, self.end, self.num_rows)


class Counts(msgspec.Struct):
    """Rows of a shard, or of all."""

    num_answered: int = 0
    num_failed: int = 0


class Manifest(msgspec.Struct):
    """`digest` covers inputs, options and model: another job of the same name has another one."""

    inputs: list[Input]
    options: dict[str, Any]
    model: dict[str, Any]
    shards: list[Shard]
    format: int = 1
    state: str = "in_progress"
    counts: Counts = msgspec.field(default_factory=Counts)
    digest: str = ""

    def seal(self) -> Manifest:
        self.digest = digest_of(self.inputs, self.options, self.model)
        return self

    @property
    def num_rows(self) -> int:
        return sum(shard.num_rows for shard in self.shards)


def digest_of(*parts: object) -> str:
    """Equal for equal parts."""
    return hashlib.sha256(msgspec.json.encode(parts, order="sorted")).hexdigest()


class Done(msgspec.Struct, frozen=True):
    """How a shard ended: by which claim, and its counts."""

    claim: int
    counts: Counts


class Record(msgspec.Struct, array_like=True):
    """The answer to a row: an output, or with a `code` the reason why there is none."""

    index: int
    value: Any
    code: str = ""
    num_attempts: int = 1


class Owner(msgspec.Struct, frozen=True):
    """A worker, and how others of its machine see whether it lives. `beat` changes with each renewal."""

    name: str
    machine: str = ""
    process: str = ""
    beat: int = 0

    @classmethod
    def here(cls, name: str = "") -> Owner:
        """A worker of this process; without a name it has one of its own."""
        process = _process(os.getpid())
        return cls(name or f"{socket.gethostname()}-{process}-{secrets.token_hex(4)}", _machine(), process)

    @property
    def is_dead(self) -> bool:
        """Whether it was a process of this machine that has ended."""
        pid = self.process.partition("-")[0]
        return bool(pid) and self.machine == _machine() and _process(int(pid)) != self.process


def _machine() -> str:
    """The same for processes that see each other's numbers."""
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        return f"{boot} {Path('/proc/self/ns/pid').readlink()}"
    except OSError:
        return ""


def _process(pid: int) -> str:
    """The process's number and start, as numbers are used again; empty if it has ended."""
    try:
        text = Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return ""
    state, *fields = text.rpartition(")")[2].split()
    return "" if state == "Z" else f"{pid}-{fields[18]}"


_ARRAY = 1


def _extension(value: Any) -> Any:
    if isinstance(value, np.ndarray):
        head = f"{value.dtype.str} {' '.join(map(str, value.shape))}".encode()
        return msgspec.msgpack.Ext(_ARRAY, head + b"\n" + np.ascontiguousarray(value).tobytes())
    if isinstance(value, np.generic):
        return value.item()
    raise TypeError(f"{type(value).__name__} cannot be kept")


def _array(code: int, data: memoryview) -> Any:
    del code
    head, _, content = bytes(data).partition(b"\n")
    dtype, *shape = head.decode().split(" ")
    return np.frombuffer(content, dtype).reshape([int(size) for size in shape if size])


def encode_records(records: Sequence[Record]) -> bytes:
    """What a file of progress has."""
    return msgspec.msgpack.encode(records, enc_hook=_extension)


def decode_records(content: bytes) -> list[Record]:
    return msgspec.msgpack.decode(content, type=list[Record], ext_hook=_array)


@dataclass
class Claim:
    """The right to work on a shard, until another worker has a claim of a higher number."""

    shard: int
    number: int
    owner: Owner
    num_chunks: int = 0


@dataclass
class _Seen:
    """Another's claim: its tag, and since when it has had it."""

    tag: str
    since_s: float
    owner: Owner | None = None


@dataclass
class Job:
    """Methods block and may be called from any thread, for one shard by one thread at a time."""

    place: Place
    manifest: Manifest
    owner: Owner
    suffix: str
    lease_s: float = 60.0
    now_s: Callable[[], float] = time.monotonic
    _seen: dict[str, _Seen] = field(default_factory=dict)
    _done: set[int] = field(default_factory=set)
    _candidates: list[int] = field(default_factory=list)
    # Shards that this worker has claimed.
    _held: dict[int, Claim] = field(default_factory=dict)

    @classmethod
    def open(cls, place: Place, make: Callable[[], Manifest], digest: str, *, starts_over: bool, **rest: Any) -> Job:
        """The job of that directory, or a new one that `make` plans.

        Raises InvalidArgumentError if another job, or another's files, are there.
        """
        if starts_over:
            _clear(place)
        found = cls._read(place)
        if found is None:
            if any(name.startswith("part-") for name in place.names()):
                raise InvalidArgumentError(
                    "the output has parts, but no _manifest.json: use another directory, or --force to replace them"
                )
            made = make()
            place.create(MANIFEST, _document(made))
            found = cls._read(place) or made
        if found.digest != digest:
            raise InvalidArgumentError(
                "the output belongs to a job with other inputs, options or another version of the model: use another "
                "directory, or --force to replace it"
            )
        return cls(place, found, **rest)

    @staticmethod
    def _read(place: Place) -> Manifest | None:
        try:
            return msgspec.json.decode(place.read(MANIFEST), type=Manifest)
        except FileNotFoundError:
            return None
        except msgspec.MsgspecError as error:
            raise InvalidArgumentError(f"{MANIFEST} cannot be read: {error}") from None

    # Claims.

    def claim(self, scope: Sequence[int]) -> Claim | None:
        """A shard of `scope` to work on; None if all of them are done, or others work on them."""
        for is_fresh in (False, True):
            if is_fresh:
                self._look(scope)
            while self._candidates:
                number = self._candidates.pop(0)
                claim = self._take(number)
                if claim is not None:
                    self._held[number] = claim
                    return claim
        return None

    def is_done(self, scope: Iterable[int]) -> bool:
        """Whether all shards of `scope` are, as far as this worker has seen."""
        return self._done.issuperset(scope)

    @property
    def num_rows_done(self) -> int:
        """Rows of the shards that are done, as far as this worker has seen."""
        return sum(self.manifest.shards[number].num_rows for number in self._done)

    def _look(self, scope: Sequence[int]) -> None:
        """List which shards are done, and which no worker claims."""
        claimed: set[int] = set()
        for name in self.place.names("_state"):
            match = _STATE.fullmatch(name)
            if match is None:
                continue
            if match[3]:
                self._done.add(int(match[1]))
            elif match[2]:
                claimed.add(int(match[1]))
        left = [number for number in scope if number not in self._done and number not in self._held]
        # Those without a worker first; of the others some may have been left.
        self._candidates = [number for number in left if number not in claimed]
        self._candidates += [number for number in left if number in claimed]

    def _take(self, shard: int) -> Claim | None:
        names = self.place.names(_state(shard))
        if _state(shard, "done") in names:
            self._done.add(shard)
            return None
        held = sorted(int(match[2]) for name in names if (match := _STATE.fullmatch(name)) and match[2])
        if held and not self._is_left(_state(shard, f"claim.{held[-1]}"), names):
            return None
        claim = Claim(shard, held[-1] + 1 if held else 0, self.owner)
        if not self.place.create(_state(shard, f"claim.{claim.number}"), msgspec.json.encode(self.owner)):
            return None
        # It may have been done, and its claims removed, since the look at it.
        if _state(shard, "done") in self.place.names(_state(shard)):
            self.release(claim)
            self._done.add(shard)
            return None
        return claim

    def _is_left(self, name: str, names: Mapping[str, str]) -> bool:
        """Whether the worker of a claim is this one as it was before, has ended, or has not renewed it in time.

        Its time begins when this worker sees it, so that no two clocks are compared.
        """
        seen = self._seen.get(name)
        if seen is None or seen.tag != names[name]:
            try:
                owner = msgspec.json.decode(self.place.read(name), type=Owner)
            except (FileNotFoundError, msgspec.MsgspecError):
                owner = None
            seen = self._seen[name] = _Seen(names[name], self.now_s(), owner)
        owner = seen.owner
        if owner is not None and (owner.name == self.owner.name or owner.is_dead):
            return True
        return self.now_s() - seen.since_s >= self.lease_s

    def renew(self, claim: Claim) -> bool:
        """Keep the claim; False if another worker has taken the shard."""
        names = self.place.names(_state(claim.shard))
        numbers = [int(match[2]) for name in names if (match := _STATE.fullmatch(name)) and match[2]]
        if _state(claim.shard, "done") in names or max(numbers, default=-1) > claim.number:
            return False
        claim.owner = msgspec.structs.replace(claim.owner, beat=claim.owner.beat + 1)
        self.place.write(_state(claim.shard, f"claim.{claim.number}"), msgspec.json.encode(claim.owner))
        return True

    def forget(self, claim: Claim) -> None:
        """The shard is done, or another worker has it."""
        self._held.pop(claim.shard, None)

    def release(self, claim: Claim) -> None:
        """Let others go on with the shard."""
        self.forget(claim)
        self.place.remove(_state(claim.shard, f"claim.{claim.number}"))

    def release_all(self) -> None:
        """Let others go on with all shards that this worker has claimed."""
        for claim in list(self._held.values()):
            self.release(claim)

    # Progress.

    def recover(self, claim: Claim) -> dict[int, Record]:
        """The records of the shard that were kept, under this claim or an earlier one, by row."""
        found: dict[int, Record] = {}
        for name in sorted(self.place.names(_state(claim.shard))):
            if name.endswith(".progress"):
                for record in decode_records(self.place.read(name)):
                    found.setdefault(record.index, record)
        return found

    def keep(self, claim: Claim, records: Sequence[Record]) -> None:
        """Write records down: a later claim need not ask for them again."""
        name = _state(claim.shard, f"{claim.number}-{claim.num_chunks:04}.progress")
        claim.num_chunks += 1
        self.place.write(name, encode_records(records))

    # Publication.

    def publish(self, claim: Claim, part: bytes, errors: bytes, counts: Counts) -> bool:
        """Make the shard's files visible; False if another worker has done so with its own."""
        if errors:
            self.place.write(_state(claim.shard, f"{claim.number}.errors"), errors)
        self.place.write(_state(claim.shard, f"{claim.number}.part"), part)
        done = Done(claim.number, counts)
        is_ours = self.place.create(_state(claim.shard, "done"), msgspec.json.encode(done))
        self._settle(claim.shard, self.place.names(_state(claim.shard)))
        self._done.add(claim.shard)
        self.forget(claim)
        return is_ours

    def _settle(self, shard: int, names: Mapping[str, str]) -> Done:
        """Move the files of a shard that is done to their places, and remove the rest of its state."""
        done = self._read_done(shard)
        own = {
            _state(shard, f"{done.claim}.errors"): f"errors/part-{shard:05}.jsonl",
            _state(shard, f"{done.claim}.part"): f"part-{shard:05}{self.suffix}",
        }
        for name, target in own.items():
            if name in names:
                self.place.move(name, target)
        for name in names:
            if name not in own and not name.endswith("/done"):
                self.place.remove(name)
        return done

    def _read_done(self, shard: int) -> Done:
        return msgspec.json.decode(self.place.read(_state(shard, "done")), type=Done)

    def finish(self) -> bool:
        """Complete what killed workers left, and mark the job as completed, if all shards are done."""
        manifest = self.manifest
        if manifest.state == "completed":
            return True
        by_shard: dict[int, dict[str, str]] = {}
        for name, tag in self.place.names("_state").items():
            if match := _STATE.fullmatch(name):
                by_shard.setdefault(int(match[1]), {})[name] = tag
        done = {number for number, names in by_shard.items() if _state(number, "done") in names}
        self._done |= done
        counts = Counts()
        for number in sorted(done):
            of_shard = self._settle(number, by_shard[number]).counts
            counts.num_answered += of_shard.num_answered
            counts.num_failed += of_shard.num_failed
        manifest.counts = counts
        if len(done) < len(manifest.shards):
            return False
        manifest.state = "completed"
        self.place.write(MANIFEST, _document(manifest))
        return True


def _state(shard: int, name: str = "") -> str:
    return f"_state/{shard:05}/{name}" if name else f"_state/{shard:05}"


def _document(manifest: Manifest) -> bytes:
    return msgspec.json.format(msgspec.json.encode(manifest), indent=1) + b"\n"


def _clear(place: Place) -> None:
    """Remove a job, its manifest last, so that a kill in between can be repeated."""
    names = place.names()
    if MANIFEST not in names and not any(name.startswith("_state/") for name in names):
        names = {name: tag for name, tag in names.items() if name.startswith("part-")}
    for name in names:
        if name.startswith(("part-", "errors/part-", "_state/")):
            place.remove(name)
    place.remove(MANIFEST)
