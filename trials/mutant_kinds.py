"""Deliberate faults in the product: each one that an unlucky refactoring could make, and what it breaks.

A fault replaces a text that is exactly once in its file. `tests` are the files, or tests, that stand for the
promise: one of them has to notice. Imports nothing of fskv.
"""

from __future__ import annotations

from dataclasses import dataclass

_STORE = ("tests/unit/test_store.py",)
_NATIVE = ("tests/unit/test_native.py",)
_READERS = ("tests/unit/test_readers_agree.py",)
_JOBS = ("tests/unit/test_jobs.py",)
_PRESENCE = ("tests/unit/test_presence.py",)
_PRUNE = ("tests/unit/test_prune.py",)
_MAC = ("tests/unit/test_mac.py",)
_CAPACITY = ("tests/unit/test_capacity.py",)
_SHARING = "tests/engines/test_engine_sharing.py"
_FAULTY = "tests/engines/test_engine_faults.py"
_IDENTITY = ("tests/unit/test_namespace.py",)
_FORMAT = ("tests/meta/test_format_vectors.py",)
_ORDER = ("tests/unit/test_cuda_order.py",)
_READINESS = ("tests/unit/test_readiness.py",)


class FaultError(ValueError):
    """A fault that does not fit the tree any more: the sentence says which and why."""


@dataclass(frozen=True, slots=True)
class Fault:
    """One change of one file."""

    name: str
    promise: str  # that it breaks, in one sentence
    path: str  # of the file, from the repository's root
    old: str
    new: str
    tests: tuple[str, ...]  # one of these files, or tests, has to notice

    @property
    def is_native(self) -> bool:
        """Whether the extension has to be built anew."""
        return self.path.endswith((".c", ".h"))

    def apply(self, text: str) -> str:
        """Return the file's text with the fault in it; raises FaultError."""
        count = text.count(self.old)
        if count != 1:
            raise FaultError(
                f"{self.name}: its old text is {count} times in {self.path}, expected once: "
                "the fault has to follow the product"
            )
        if self.old == self.new:
            raise FaultError(f"{self.name}: its new text is the old one")
        return text.replace(self.old, self.new)


FAULTS = (
    # --- what is read is checked ----------------------------------------------------------
    Fault(
        "rows-unchecked",
        "Every row of the wanted blocks is compared with its digest before it is served.",
        "fskv/format/chunk_file.py",
        "    if mac.same(found, wanted):\n        return\n",
        "    if len(found) == len(wanted):\n        return\n",
        _STORE,
    ),
    Fault(
        "rows-unchecked-c",
        "Every row of the wanted blocks is compared with its digest outside the interpreter too.",
        "fskv/csrc/chunk_io.c",
        "good = memcmp(digest, digests + 8 * row, 8) == 0;",
        "good = memcmp(digest, digest + 0 * row, 8) == 0;",
        _NATIVE,
    ),
    Fault(
        "last-row-unchecked-c",
        "The last row of a chunk is compared too, however short it is.",
        "fskv/csrc/chunk_io.c",
        "good && at < stop; at += ROW, row++)",
        "good && at + ROW <= stop; at += ROW, row++)",
        _NATIVE,
    ),
    Fault(
        "header-unchecked",
        "A header that fails its checksum is not believed.",
        "fskv/format/chunk_file.py",
        "    if xxhash.xxh3_64_intdigest(raw) != checksum:\n",
        "    if not checksum:\n",
        ("tests/unit/test_chunk_file.py",),
    ),
    Fault(
        "header-unchecked-c",
        "A header that fails its checksum is not believed outside the interpreter either.",
        "fskv/csrc/chunk_io.c",
        "prefix[3] != 0 || header_checksum(slot, layout->header_nbytes) != checksum)",
        "prefix[3] != 0 || checksum == 0)",
        _NATIVE,
    ),
    Fault(
        "tail-unchecked-c",
        "A header is refused outside the interpreter for what follows the digests of its rows, too.",
        "fskv/csrc/chunk_io.c",
        "        !check_tail(at + digests_nbytes, end, slot + layout->header_nbytes))\n",
        "        at + digests_nbytes > end)\n",
        _READERS,
    ),
    Fault(
        "padding-unchecked-c",
        "Only zeros stand behind the map of a header that is taken outside the interpreter.",
        "fskv/csrc/chunk_io.c",
        "           all_zero(end, payload);\n",
        "           end <= payload;\n",
        _READERS,
    ),
    Fault(
        "padding-unchecked",
        "Only zeros stand behind the map of a header that is taken in Python.",
        "fskv/format/chunk_file.py",
        "    if header[stop:padding_stop] != bytes(padding_stop - stop):\n",
        "    if stop > padding_stop:\n",
        _READERS,
    ),
    Fault(
        "codec-of-any-type",
        "A field of a header has the type that the format says, and not only an equal value.",
        "fskv/format/chunk_file.py",
        "        or (type(codec), type(row)) != (int, int)\n",
        "",
        _READERS,
    ),
    Fault(
        "fields-uncounted",
        "A header has no more fields than the format allows.",
        "fskv/format/chunk_file.py",
        "    if num_fields > _MAX_FIELDS:\n",
        "    if num_fields > _MAX_FIELDS << 8:\n",
        _READERS,
    ),
    Fault(
        "key-uncompared",
        "A sound file of another chunk under this chunk's name is not served.",
        "fskv/data_path/store.py",
        '            "key": (header.key_hash, file_id.key_hash),\n',
        "",
        _STORE,
    ),
    Fault(
        "key-uncompared-c",
        "A sound file of another chunk under this chunk's name is not served in C either.",
        "fskv/csrc/chunk_io.c",
        "        !take(&at, end, file->key, file->key_nbytes) ||\n",
        "        (at += file->key_nbytes) > end ||\n",
        _NATIVE,
    ),
    Fault(
        "namespace-uncompared",
        "A file of another model, dtype or tenant is not served, however it came here.",
        "fskv/data_path/store.py",
        '            "namespace": (header.namespace_digest, self._directory.digest),\n',
        "",
        _STORE,
    ),
    Fault(
        "layout-uncompared",
        "A file whose pages lie in another way is not served.",
        "fskv/data_path/store.py",
        '            "layout": (header.layout_digest, layout.digest),\n',
        "",
        _STORE,
    ),
    Fault(
        "identity-uncompared-c",
        "Namespace, layout, group and rank are compared outside the interpreter too.",
        "fskv/csrc/chunk_io.c",
        "        !take(&at, end, layout->middle, layout->middle_nbytes))\n",
        "        (at += layout->middle_nbytes) > end)\n",
        _NATIVE,
    ),
    Fault(
        "hole-served",
        "Blocks that a partial chunk does not have are absent, and not zeros.",
        "fskv/data_path/store.py",
        "        if header.first_block > first_block:\n",
        "        if header.first_block > first_block + num_blocks:\n",
        _STORE,
    ),
    Fault(
        "hole-served-c",
        "Blocks that a partial chunk does not have are left to Python, which knows them as absent.",
        "fskv/csrc/chunk_io.c",
        "for (uint32_t b = 0; b <= file->first_block && !found; b++)",
        "for (uint32_t b = 0; b <= layout->num_blocks && !found; b++)",
        _NATIVE,
    ),
    # --- a file that is cut off -------------------------------------------------------------
    Fault(
        "length-unchecked",
        "A file that is too short or too long is refused before anything of it is read.",
        "fskv/data_path/store.py",
        "        if file.nbytes != layout.file_nbytes:\n",
        "        if not file.nbytes:\n",
        _STORE,
    ),
    Fault(
        "length-unchecked-c",
        "A file that is too short or too long is refused outside the interpreter too.",
        "fskv/csrc/chunk_io.c",
        "S_ISREG(info.st_mode) && (size_t)info.st_size == file_nbytes;",
        "S_ISREG(info.st_mode);",
        _NATIVE,
    ),
    Fault(
        "short-file-is-there",
        "A store replaces a file that is cut off instead of taking it for the chunk.",
        "fskv/data_path/store.py",
        "S_ISREG(info.st_mode) or info.st_size != layout.file_nbytes:",
        "S_ISREG(info.st_mode):",
        _STORE,
    ),
    Fault(
        "short-file-is-there-c",
        "A store outside the interpreter replaces a file that is cut off.",
        "fskv/csrc/chunk_io.c",
        "        (size_t)info.st_size != layout->header_nbytes + layout->payload_nbytes)\n",
        "        info.st_size == 0)\n",
        _NATIVE,
    ),
    Fault(
        "short-file-hits",
        "A lookup in Python does not promise a file that is cut off.",
        "fskv/index/presence.py",
        "        return stat.S_ISREG(info.st_mode) and info.st_size == nbytes\n",
        "        return stat.S_ISREG(info.st_mode) and info.st_size > 0\n",
        _PRESENCE,
    ),
    Fault(
        "short-file-hits-c",
        "A lookup outside the interpreter does not promise a file that is cut off.",
        "fskv/csrc/files.c",
        "            return S_ISREG(info.st_mode) && info.st_size == file->nbytes;\n",
        "            return S_ISREG(info.st_mode) && info.st_size > 0;\n",
        _PRESENCE,
    ),
    # --- who may touch a KV page, and until when --------------------------------------------
    Fault(
        "guard-not-entered",
        "A load that was given up writes no KV page any more.",
        "fskv/data_path/runner.py",
        "        if job.guard.enter():  # else the job was given up, and is closed by whoever did it\n",
        "        if job.guard.enter() or task.queued is not None:\n",
        _JOBS,
    ),
    Fault(
        "guard-not-entered-c",
        "A load that was given up writes no KV page outside the interpreter either.",
        "fskv/csrc/queue.c",
        "    if (guard_enter(transfer->guard)) {\n        copy_spans(",
        "    if (guard_enter(transfer->guard) || transfer->pages != NULL) {\n        copy_spans(",
        _NATIVE,
    ),
    Fault(
        "guard-does-not-wait",
        "Giving up waits for a copy in progress, so that pages are free when it returns.",
        "fskv/data_path/threads.py",
        "            while self._num_inside:\n                self._left.wait()\n",
        "",
        ("tests/unit/test_threads.py", "tests/unit/test_jobs.py"),
    ),
    Fault(
        "guard-does-not-wait-c",
        "Giving up waits for a copy in progress outside the interpreter too.",
        "fskv/csrc/transfer.c",
        "    while (self->num_inside > 0)\n",
        "    while (self->num_inside > 0 && !self->abandoned)\n",
        _NATIVE,
    ),
    Fault(
        "deadline-never",
        "A load is given up at its deadline, and the request is computed instead.",
        "fskv/data_path/job.py",
        "        self.late = now >= self.deadline_at\n",
        "        self.late = now - self.submitted_at >= self.deadline_at\n",
        _JOBS,
    ),
    Fault(
        "reset-leaves-the-queue",
        "What waits to be stored when the engine gives its KV up is dropped.",
        "fskv/data_path/runner.py",
        "        for job in list(self._jobs.values()):\n"
        "            self._abandon(job, Status.SKIPPED)\n"
        "        for task in self._ends.open_stores:\n",
        "        for task in self._ends.open_stores:\n",
        _JOBS,
    ),
    Fault(
        "reset-leaves-the-workers",
        "A reset returns when no worker touches the KV any more for what was asked of it before.",
        "fskv/engines/vllm/connector.py",
        "        drop_in_workers()\n",
        "",
        ("tests/adapter/test_vllm_reset.py",),
    ),
    Fault(
        "reset-leaves-the-deferred",
        "What vLLM has put off to the next step is dropped at a reset, too.",
        "fskv/engines/vllm/quirks.py",
        "half._unsubmitted_store_jobs = half._unsubmitted_store_jobs, []  # noqa: SLF001\n",
        "_ = half._unsubmitted_store_jobs, []  # noqa: SLF001\n",
        ("tests/adapter/test_vllm_reset.py",),
    ),
    Fault(
        "hung-threads-kept",
        "A thread whose call hangs is replaced, or a few hung reads would end all I/O.",
        "fskv/data_path/runner.py",
        "                self._pool.write_off(queued)\n",
        "",
        _JOBS,
    ),
    Fault(
        "hung-threads-unbounded",
        "No more threads are started than may hang, however many reads do.",
        "fskv/data_path/threads.py",
        "            if self._num_alive >= self._num_threads + self._max_hung:\n",
        "            if self._num_alive < 0:\n",
        _JOBS,
    ),
    Fault(
        "loads-wait-for-stores",
        "A load overtakes the stores that are queued.",
        "fskv/data_path/threads.py",
        "                (self._urgent if task.urgent else self._normal)[task] = None\n",
        "                self._normal[task] = None\n",
        _JOBS,
    ),
    Fault(
        "reported-when-written",
        "A store is reported when its pages are gathered, and not when they are written.",
        "fskv/data_path/runner.py",
        "        self._ends.pages_free(task, None, task.move.plan.nbytes, 0.0)\n        return True\n",
        "        return True\n",
        _JOBS,
    ),
    Fault(
        "failed-load-is-good",
        "A load of which one chunk was not good is reported as failed.",
        "fskv/data_path/ends.py",
        "            if job.is_load and status is not Status.OK:\n",
        "            if job.is_load and status is not Status.OK and job.num_open == 1:\n",
        _JOBS,
    ),
    Fault(
        "lost-chunk-is-good",
        "A load of which one chunk was gone is reported as failed.",
        "fskv/data_path/ends.py",
        "            if job.is_load and status is not Status.OK:\n",
        "            if job.is_load and status not in (Status.OK, Status.MISSING):\n",
        ("tests/unit/test_jobs.py", f"{_SHARING}::test_damaged_chunks_cost_a_recompute_and_heal"),
    ),
    # --- what is published ------------------------------------------------------------------
    Fault(
        "written-under-its-name",
        "A file gets its name when it is complete, by one rename.",
        "fskv/data_path/store.py",
        "        part = self._directory.part_path(path)\n        with self._shard(path)",
        "        part = path\n        with self._shard(path)",
        _STORE,
    ),
    Fault(
        "renamed-before-written-c",
        "A file gets its name when it is complete, outside the interpreter too.",
        "fskv/csrc/chunk_io.c",
        "    bool good = write_all(layout, fd, slot, layout->header_nbytes + layout->payload_nbytes) &&\n"
        "                (!layout->fsync || fsync(fd) == 0);\n"
        "    good = close(fd) == 0 && good; /* NFS may report a failed write only here */\n"
        "    if (good && renameat(*directory, part, *directory, name) == 0)\n"
        "        return CHUNK_OK;\n",
        "    bool good = renameat(*directory, part, *directory, name) == 0 &&\n"
        "                write_all(layout, fd, slot, layout->header_nbytes + layout->payload_nbytes) &&\n"
        "                (!layout->fsync || fsync(fd) == 0);\n"
        "    good = close(fd) == 0 && good;\n"
        "    if (good)\n"
        "        return CHUNK_OK;\n",
        _NATIVE,
    ),
    Fault(
        "part-not-exclusive",
        "A part is made exclusively: what stands under its name is neither written to nor followed.",
        "fskv/root/files.py",
        "    fd = os.open(path, _CREATE | more_flags, mode, dir_fd=dir_fd)\n",
        "    fd = os.open(path, (_CREATE | more_flags) & ~os.O_EXCL, mode, dir_fd=dir_fd)\n",
        ("tests/unit/test_store.py", "tests/unit/test_files.py"),
    ),
    Fault(
        "links-followed",
        "No link in the place of a chunk is followed.",
        "fskv/transports/chunk_fd.py",
        "_OPEN_READ = os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK\n",
        "_OPEN_READ = os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK\n",
        _STORE,
    ),
    Fault(
        "part-not-exclusive-c",
        "A part is made exclusively outside the interpreter too.",
        "fskv/csrc/chunk_io.c",
        "O_WRONLY | O_CREAT | O_EXCL | O_CLOEXEC | O_NOFOLLOW | layout->open_flags;",
        "O_WRONLY | O_CREAT | O_CLOEXEC | O_NOFOLLOW | layout->open_flags;",
        _NATIVE,
    ),
    Fault(
        "lease-not-exclusive",
        "Two processes that take a free lease at once do not both hold it.",
        "fskv/root/files.py",
        "        os.link(part, name, src_dir_fd=part_dir_fd, dst_dir_fd=dir_fd, follow_symlinks=False)\n",
        "        os.rename(part, name, src_dir_fd=part_dir_fd, dst_dir_fd=dir_fd)\n",
        ("tests/unit/test_lease.py", "tests/unit/test_files.py"),
    ),
    Fault(
        "living-holder-replaced",
        "A lease is taken over only from a holder that is dead.",
        "fskv/bounds/lease.py",
        "        if found is not None and not self._is_dead(found):\n            return\n",
        "",
        ("tests/unit/test_lease.py",),
    ),
    Fault(
        "part-left-behind",
        "A write that fails leaves no part.",
        "fskv/transports/chunk_fd.py",
        "    except BaseException as error:\n        unlink_quietly(_name(path, dir_fd), dir_fd)\n",
        "    except BaseException as error:\n",
        _STORE,
    ),
    Fault(
        "part-left-behind-c",
        "A write that fails outside the interpreter leaves no part.",
        "fskv/csrc/chunk_io.c",
        "    (void)unlinkat(*directory, part, 0);\n",
        "",
        _NATIVE,
    ),
    Fault(
        "living-parts-removed",
        "The part of a writer that lives is not removed.",
        "fskv/root/process_id.py",
        " or age_ns >= grace_s * 1e9\n",
        " or age_ns >= 0\n",
        ("tests/unit/test_maintenance.py",),
    ),
    Fault(
        "old-bytes-stored",
        "Nothing of what a staging slot held before gets into a file.",
        "fskv/data_path/store.py",
        "        transport.fill_zero(slot, base, base + first_block * layout.block_nbytes)\n",
        "",
        _STORE,
    ),
    Fault(
        "incomplete-chunk-stored",
        "A chunk whose last blocks were not given is not stored.",
        "fskv/data_path/runner.py",
        "            if whole and self._ends.begin_store(task, limit):\n",
        "            if self._ends.begin_store(task, limit):\n",
        _JOBS,
    ),
    Fault(
        "guessed-chunk-stored",
        "A chunk of which vLLM does not say where each block is, is dropped instead of guessed.",
        "fskv/plan/spans.py",
        " or (complete_tail and not exact):\n",
        ":\n",
        ("tests/unit/test_hybrid_planner.py",),
    ),
    Fault(
        "replaced-file-discarded",
        "A good file that has replaced a bad one meanwhile is not discarded in its place.",
        "fskv/data_path/store.py",
        "        if file.same_file(path, shard):\n",
        "        if os.path.lexists(path):\n",
        _STORE,
    ),
    Fault(
        "root-made-anew",
        "Where the root is gone nothing is made in its place.",
        "fskv/root/beneath.py",
        '    above, _, name = path.rpartition("/")\n',
        '    above, _, name = path.rpartition("/")\n    os.makedirs(above, exist_ok=True)\n',
        (
            "tests/unit/test_store.py",
            "tests/unit/test_root.py",
            f"{_FAULTY}::test_root_removed_while_running_is_neither_missed_nor_made_again",
        ),
    ),
    Fault(
        "root-made-at-start",
        "A root that is missing at start is not made.",
        "fskv/root/root.py",
        "            retry_stale(lambda: _check_directory(path))\n",
        "            os.makedirs(path, exist_ok=True)\n",
        (
            "tests/unit/test_root.py",
            f"{_FAULTY}::test_bad_configuration_is_one_sentence_at_start_up",
        ),
    ),
    # --- what is believed to be there -------------------------------------------------------
    Fault(
        "negative-ttl-ignored",
        "That a chunk is absent is believed for negative_ttl_s, and then it is looked for again.",
        "fskv/index/presence.py",
        "        missed = _Known(reason, now + self._negative_ttl_s)\n",
        "        missed = _Known(reason, now + self._positive_ttl_s)\n",
        _PRESENCE,
    ),
    Fault(
        "lookup-looks-itself",
        "A lookup leaves the disk to the probe threads.",
        "fskv/index/presence.py",
        "        self._queued[key] = missed_before\n",
        "        self._queued[key] = missed_before\n        self._probe([key], bytes(1))\n",
        _PRESENCE,
    ),
    Fault(
        "presence-unbounded",
        "What the presence index remembers is bounded.",
        "fskv/index/presence.py",
        "        while len(self._entries) > self._max_known:\n",
        "        while len(self._entries) < 0:\n",
        _PRESENCE,
    ),
    Fault(
        "failed-load-still-hits",
        "A chunk whose load failed is a miss at once, or its request would fail again and again.",
        "fskv/offload/lookup.py",
        "                self.presence.mark_failed(chunk, status)\n",
        "",
        ("tests/adapter/test_vllm_contract.py",),
    ),
    Fault(
        "quarantine-still-hits",
        "A chunk that was bad is a miss until its quarantine is over.",
        "fskv/index/presence.py",
        "            self._remember(chunk, _QUARANTINED, self._quarantine_s)\n",
        "",
        _PRESENCE,
    ),
    Fault(
        "removed-chunk-hits",
        "No hit outlives the news that its chunk was pruned.",
        "fskv/index/presence.py",
        "        return removal is not None and removal.number > removals\n",
        "        return removal is not None and removal.number < removals\n",
        _PRESENCE,
    ),
    Fault(
        "one-rank-is-enough",
        "A chunk is a hit when every rank has published its part, and not before.",
        "fskv/offload/lookup.py",
        "        if len(published) < self._num_movers:\n",
        "        if not published:\n",
        ("tests/adapter/test_vllm_contract.py",),
    ),
    Fault(
        "breaker-never-opens",
        "After failures in a row the root is left alone.",
        "fskv/data_path/breaker.py",
        "                self._failures_in_row += 1\n",
        "                self._failures_in_row = 1\n",
        ("tests/unit/test_presence.py", "tests/unit/test_jobs.py"),
    ),
    # --- bounds, and what goes --------------------------------------------------------------
    Fault(
        "bound-ignored",
        "A chunk is stored only if there is room for it below every bound.",
        "fskv/bounds/client.py",
        "            if self._used + nbytes > self._allowed or self._silent:\n                return False\n",
        "            if self._silent:\n                return False\n",
        ("tests/unit/test_capacity.py",),
    ),
    Fault(
        "keep-free-ignored",
        "What is to stay free on the disk stays free.",
        "fskv/bounds/quota.py",
        "        limit = space.total_nbytes - keep\n",
        "        limit = space.total_nbytes\n",
        _CAPACITY,
    ),
    Fault(
        "namespace-bound-ignored",
        "The bound of a namespace holds beside the bound of the root.",
        "fskv/bounds/quota.py",
        "            _tighten(by_namespace, [claim.namespace], [limits.namespace_max_nbytes])\n",
        "            pass\n",
        _CAPACITY,
    ),
    Fault(
        "stores-go-on-when-full",
        "A full disk pauses stores.",
        "fskv/bounds/client.py",
        "        if self.paused:\n            return False\n        self._asked",
        "        self._asked",
        _CAPACITY,
    ),
    Fault(
        "maintenance-stays-dead",
        "A maintenance process that dies is started again.",
        "fskv/bounds/client.py",
        "            if now >= self._next_start:\n",
        "            if now >= self._next_start and self._process is None:\n",
        _CAPACITY,
    ),
    Fault(
        "maintenance-pipe-blocks",
        "A maintenance process that does not read holds up no step of the engine.",
        "fskv/bounds/client.py",
        "        for pipe in (self._process.stdin, self._process.stdout):\n            os.set_blocking",
        "        for pipe in (self._process.stdout,):\n            os.set_blocking",
        _CAPACITY,
    ),
    Fault(
        "others-grants-ignored",
        "What other engines were granted and have not written yet counts against the bound.",
        "fskv/bounds/quota.py",
        "        return self.limit - self.counted - self.outstanding\n",
        "        return self.limit - self.counted\n",
        ("tests/unit/test_claims.py",),
    ),
    Fault(
        "impossible-inodes-believed",
        "Nothing is pruned for numbers of a file system that cannot be true.",
        "fskv/root/filesystem.py",
        "    return (total, free) if 0 <= free <= total else (0, 0)\n",
        "    return (total, free)\n",
        ("tests/unit/test_filesystem.py", "tests/unit/test_maintenance.py"),
    ),
    Fault(
        "unlistable-never-counted",
        "Directories that cannot be listed and stand still keep nothing from being counted.",
        "fskv/bounds/count_checks.py",
        "        return not news and len(moving) <= _MAX_UNLISTABLE\n",
        "        return not news and len(failed) <= _MAX_UNLISTABLE\n",
        ("tests/unit/test_maintenance.py",),
    ),
    Fault(
        "future-parts-stay",
        "A part of the future is no living writer's.",
        "fskv/root/process_id.py",
        "    age_ns = now_ns - clamp_mtime(mtime_ns, now_ns)\n",
        "    age_ns = now_ns - mtime_ns\n",
        ("tests/unit/test_maintenance.py",),
    ),
    Fault(
        "interval-not-claimed",
        "An engine's claim says what a last use is rounded to.",
        "fskv/bounds/maintenance.py",
        '        touch_interval_s=options["touch_interval_s"],\n',
        "",
        ("tests/unit/test_capacity.py",),
    ),
    Fault(
        "lost-grant-counted",
        "A grant that an error kept from the engine is not counted as one that it has.",
        "fskv/bounds/maintenance.py",
        "            self._granted -= 0 if given else amount\n",
        "            pass\n",
        ("tests/unit/test_maintenance.py",),
    ),
    Fault(
        "sums-without-end",
        "Numbers of the count that add up beyond 64 bits end no maintenance process.",
        "fskv/bounds/quota.py",
        "        return min(MAX_COUNT, self.others[0] + sum(n for n, _ in self.namespaces.values()))\n",
        "        return self.others[0] + sum(n for n, _ in self.namespaces.values())\n",
        ("tests/unit/test_maintenance.py",),
    ),
    Fault(
        "sparse-counts-whole",
        "A file counts for no more than the file system's size.",
        "fskv/index/scan.py",
        "        limit(shard, most)\n",
        "",
        ("tests/unit/test_maintenance.py",),
    ),
    Fault(
        "claim-without-end",
        "A claim of more than 64 KiB is not read.",
        "fskv/bounds/ledger.py",
        "    if len(content) > most_nbytes:\n        raise ValueError",
        "    if len(content) < 0:\n        raise ValueError",
        ("tests/unit/test_claims.py",),
    ),
    Fault(
        "limits-of-no-names",
        "Limits of namespaces that do not exist count for nothing.",
        "fskv/bounds/quota.py",
        "        for name in all_namespaces & limits.namespaces.keys():\n",
        "        for name in limits.namespaces.keys():\n",
        ("tests/unit/test_claims.py",),
    ),
    Fault(
        "most-recent-first",
        "What was used least recently is pruned first.",
        "fskv/bounds/evict.py",
        "    for at in _oldest_first(mtimes, nbytes,",
        "    for at in _oldest_first(-mtimes, nbytes,",
        _PRUNE,
    ),
    Fault(
        "used-meanwhile-pruned",
        "What was used since it was listed waits for its new turn.",
        "fskv/bounds/evict.py",
        "        if last_use_ns > mtime_ns:\n",
        "        if last_use_ns < mtime_ns:\n",
        _PRUNE,
    ),
    Fault(
        "prune-follows-links",
        "Nothing behind a link in the place of a directory is listed or removed.",
        "fskv/index/scan.py",
        "OPEN_SHARD = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC\n",
        "OPEN_SHARD = os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC\n",
        ("tests/unit/test_prune.py", "tests/unit/test_scan.py"),
    ),
    Fault(
        "linked-directories-followed",
        "What is written, removed or touched is in a directory that no link led to.",
        "fskv/root/beneath.py",
        "_ONE = os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC\n",
        "_ONE = os.O_DIRECTORY | os.O_CLOEXEC\n",
        ("tests/unit/test_beneath.py",),
    ),
    Fault(
        "linked-directories-followed-c",
        "What is written, removed or touched outside the interpreter is where no link led to.",
        "fskv/csrc/beneath.c",
        "enum { NO_SYMLINKS = 0x04 };\n",
        "enum { NO_SYMLINKS = 0 };\n",
        ("tests/unit/test_beneath.py",),
    ),
    Fault(
        "mode-set-by-path",
        "A new directory gets its mode through its descriptor.",
        "fskv/root/beneath.py",
        "            made = True\n",
        "            made = True\n            os.chmod(path, mode)\n",
        ("tests/unit/test_beneath.py",),
    ),
    Fault(
        "foreign-namespace-pruned",
        "Nothing goes of what is only called like a namespace.",
        "fskv/bounds/leader.py",
        "        return [name for name in self._catalogues if name not in self._manifests.foreign]\n",
        "        return list(self._catalogues)\n",
        ("tests/unit/test_maintenance.py",),
    ),
    Fault(
        "prune-removes-what-is-no-file",
        "What took a chunk's name and is no regular file is not removed.",
        "fskv/root/beneath.py",
        "    if not stat.S_ISREG(info.st_mode) or not may_go(info):\n",
        "    if stat.S_ISDIR(info.st_mode) or not may_go(info):\n",
        _PRUNE,
    ),
    Fault(
        "gc-removes-foreign-files",
        "gc removes only parts that have the name of a writer of fskv's.",
        "fskv/root/process_id.py",
        "    return stem != name and (is_our_name(stem) or _OUR_PROBE.fullmatch(stem) is not None)\n",
        "    return stem != name\n",
        ("tests/tools/test_gc.py",),
    ),
    Fault(
        "gc-removes-living-parts",
        "gc leaves the part of a writer that may live.",
        "fskv/root/process_id.py",
        "    return provably_dead(part.removesuffix(",
        "    return not provably_dead(part.removesuffix(",
        ("tests/tools/test_gc.py",),
    ),
    # --- who may write what is served -------------------------------------------------------
    Fault(
        "mac-uncompared",
        "A sealed file is exactly what a holder of the key wrote, or it is refused.",
        "fskv/format/mac.py",
        "    return hmac.compare_digest(found, expected)\n",
        "    return hmac.compare_digest(found, found)\n",
        _MAC,
    ),
    Fault(
        "secret-in-the-error",
        "No error says what is in a key file.",
        "fskv/format/mac.py",
        "line {line_number}: expected {expected}",
        "line {line_number}: {line!r}, expected {expected}",
        _MAC,
    ),
    Fault(
        "header-mac-uncompared",
        "The tag over the header of a sealed file is compared.",
        "fskv/format/integrity.py",
        "        if not mac.same(key.tag(memoryview(header)[:tag_at]), bytes(header[tag_at:])):\n",
        "        if len(header[tag_at:]) != mac.TAG_NBYTES:\n",
        _MAC,
    ),
    Fault(
        "seal-not-demanded",
        "Where files are sealed, one that had its seal removed is refused.",
        "fskv/format/chunk_file.py",
        "    raw, seal_nbytes = _checked_header(data)\n",
        "    raw, seal_nbytes = _checked_header(data)\n    integrity = integrity if seal_nbytes else None\n",
        _MAC,
    ),
    # --- who shares with whom ---------------------------------------------------------------
    Fault(
        "hash-seed-not-in-identity",
        "Every field of the identity is in its digest, the seed of the engine's hashes for one.",
        "fskv/namespace.py",
        "        for name in sorted(field.name for field in fields(self)):\n",
        '        for name in sorted({field.name for field in fields(self)} - {"hash_seed"}):\n',
        _IDENTITY,
    ),
    Fault(
        "group-page-size-not-in-identity",
        "Every field of a KV group is in the digest, its page sizes for one.",
        "fskv/namespace.py",
        "                value = [{f.name: getattr(g, f.name) for f in fields(g)} for g in value]\n",
        "                value = [\n"
        '                    {f.name: getattr(g, f.name) for f in fields(g) if f.name != "page_nbytes"}\n'
        "                    for g in value\n"
        "                ]\n",
        _IDENTITY,
    ),
    Fault(
        "surrogates-in-an-identity",
        "A text that no other language can keep is refused in an identity.",
        "fskv/namespace.py",
        "        text.encode()\n",
        '        text.encode("utf-8", "surrogatepass")\n',
        _FORMAT,
    ),
    Fault(
        "unicode-of-this-python",
        "An identity has one directory, whatever Unicode the Pythons of its nodes know.",
        "fskv/namespace.py",
        "    data = unicodedata.ucd_3_2_0\n",
        "    data = unicodedata\n",
        _FORMAT,
    ),
    Fault(
        "sizes-that-no-header-holds",
        "What no chunk file could say is refused in an identity.",
        "fskv/namespace.py",
        '                if not bounds[0] <= cast("int", number) <= bounds[1]:\n',
        '                if not bounds[0] <= cast("int", number):\n',
        _FORMAT,
    ),
    Fault(
        "ascii-only-in-texts",
        "Canonical JSON is what docs/format.md says, to the last escape.",
        "fskv/namespace.py",
        "ensure_ascii=True, allow_nan=False\n",
        "ensure_ascii=False, allow_nan=False\n",
        _FORMAT,
    ),
    Fault(
        "hash-seed-not-asked",
        "Engines whose block hashes differ do not share: the seed is the environment's.",
        "fskv/engines/vllm/identity.py",
        '        return f"PYTHONHASHSEED={seed}"\n',
        '        return "PYTHONHASHSEED"\n',
        ("tests/adapter/test_identity_settings.py",),
    ),
    Fault(
        "weights-by-name",
        "Engines with other weights under the same name do not share.",
        "fskv/engines/vllm/identity.py",
        "        weights=weights,\n",
        "        weights=_model_name(model.model),\n",
        ("tests/adapter/test_identity_settings.py",),
    ),
    Fault(
        "pages-by-name",
        "Engines whose pages have other bytes inside do not share.",
        "fskv/engines/vllm/page_layout.py",
        "            return f\"{backend}{f'({isa})' if isa else ''}/{view}/{digest}\"\n",
        "            return backend\n",
        ("tests/adapter/test_identity_isa.py",),
    ),
    Fault(
        "media-by-name",
        "A medium is not served for another one under the same name.",
        "fskv/engines/vllm/media.py",
        "        return block_hash + _MARK + self._so_far[count - 1][:_DIGEST_NBYTES]\n",
        "        return block_hash\n",
        ("tests/adapter/test_media.py",),
    ),
    Fault(
        "media-name-believed-again",
        "A name that stood for two media is not believed again.",
        "fskv/engines/vllm/media.py",
        "                self._contents[row, i] = 0\n",
        "                return False\n",
        ("tests/adapter/test_media.py",),
    ),
    Fault(
        "replaced-weights-unseen",
        "Weights that are replaced while they are loaded stop the start.",
        "fskv/engines/vllm/loaded.py",
        "        if changed:\n",
        "        if changed and not now:\n",
        ("tests/adapter/test_loaded.py",),
    ),
    Fault(
        "reload-unseen",
        "Weights that are loaded again in a running engine turn fskv off.",
        "fskv/engines/vllm/loaded.py",
        "            self.reloaded = True\n",
        "            self.reloaded = False\n",
        ("tests/adapter/test_loaded.py",),
    ),
    Fault(
        "switches-not-in-identity",
        "Settings that quantise or simulate keep engines apart.",
        "fskv/engines/vllm/switches.py",
        "        if value not in neutral:\n",
        "        if value not in neutral and value is None:\n",
        ("tests/adapter/test_settings.py",),
    ),
    Fault(
        "kv-dtype-of-the-model",
        "Engines whose KV has another type than the model do not share with those where it is the same.",
        "fskv/engines/vllm/identity.py",
        "        kv_cache_dtype=kv_dtype,\n",
        "        kv_cache_dtype=_name(model.dtype),\n",
        ("tests/adapter/test_identity_settings.py",),
    ),
    Fault(
        "policy-fail-kept",
        "Damage fails no request, whatever failure policy the user chose.",
        "fskv/engines/vllm/connector.py",
        '        transfer.kv_load_failure_policy = "recompute"\n',
        "",
        (
            f"{_FAULTY}::test_policy_fail_is_named_and_replaced_so_that_damage_never_fails_a_request",
        ),
    ),
    Fault(
        "tenant-not-in-identity",
        "Tenants do not share.",
        "fskv/engines/vllm/identity.py",
        "        tenant=config.tenant,\n",
        "",
        ("tests/adapter/test_identity_settings.py",),
    ),
    Fault(
        "weights-half-sampled",
        "Weights that differ in the second half of a tensor have another fingerprint.",
        "fskv/identity/checkpoint_samples.py",
        "    yield middle, middle + SAMPLE_NBYTES\n",
        "",
        ("tests/unit/test_fingerprint.py", "tests/unit/test_checkpoint_samples.py"),
    ),
    # --- pages on a GPU ----------------------------------------------------------------------
    Fault(
        "copy-before-its-event",
        "A copy between pages and a slot begins after what the engine has launched for them.",
        "fskv/transports/cuda.py",
        "            stream.wait_event(ready)\n",
        "            pass\n",
        _ORDER,
    ),
    Fault(
        "copy-still-runs",
        "A copy is over when the call returns.",
        "fskv/transports/cuda.py",
        "            finally:\n                stream.synchronize()\n",
        "            finally:\n                pass\n",
        _ORDER,
    ),
    Fault(
        "event-after-the-copy",
        "The event is waited for before the copy, not behind it.",
        "fskv/transports/cuda.py",
        "        if ready is not None:\n            stream.wait_event(ready)\n"
        "        with torch.cuda.stream(stream):\n"
        "            try:\n                yield stream\n            finally:\n",
        "        with torch.cuda.stream(stream):\n            try:\n                yield stream\n"
        "            finally:\n                if ready is not None:\n"
        "                    stream.wait_event(ready)\n",
        _ORDER,
    ),
    Fault(
        "bounce-buffer-in-use",
        "A bounce buffer is given back when nothing uses it any more.",
        "fskv/transports/cuda.py",
        "                self._wait()\n",
        "",
        _ORDER,
    ),
    Fault(
        "copy-on-the-default-stream",
        "Copies run on a stream of the thread's own.",
        "fskv/transports/cuda.py",
        "        with torch.cuda.stream(stream):\n",
        "        with contextlib.nullcontext():\n",
        _ORDER,
    ),
    Fault(
        "context-on-gpu-0",
        "A rank's threads touch no other GPU than its own.",
        "fskv/transports/cuda.py",
        "        torch.cuda.set_device(self.device)\n",
        "        pass\n",
        _ORDER,
    ),
    Fault(
        "stream-of-the-engines",
        "Copies wait for no stream of the engine's.",
        "fskv/transports/cuda.py",
        "            own = self._local.own_stream = _OwnStream(self._open_driver(), self.device)\n",
        "            raise OSError\n",
        _ORDER,
    ),
    Fault(
        "store-takes-a-thread-too-early",
        "No I/O thread waits for a forward.",
        "fskv/data_path/runner.py",
        "        if ready is None or not tasks or has_fired(ready):\n",
        "        if ready is None or not tasks or not job.is_load or has_fired(ready):\n",
        _READINESS,
    ),
    Fault(
        "read-ahead-keeps-its-slot",
        "A load that was read ahead and given up gives its slot back.",
        "fskv/data_path/runner.py",
        "            if job.is_load and taken:\n",
        "            if job.is_load and taken and task.slot is None:\n",
        _READINESS,
    ),
    Fault(
        "deadline-counts-the-forward",
        "A deadline is the disk's: a forward does not count.",
        "fskv/data_path/job.py",
        "        self.paused_at = None if num_at_disk else now\n",
        "        self.paused_at = None\n",
        _READINESS,
    ),
    Fault(
        "read-ahead-past-the-guard",
        "A load that was read ahead and given up touches no page.",
        "fskv/data_path/job.py",
        "            parked = [task for task in self.tasks if task.parked]\n",
        "            parked = list(self.tasks)\n",
        _READINESS,
    ),
    # --- inspectable ------------------------------------------------------------------------
    Fault(
        "counters-fall",
        "A counter never falls, since Prometheus raises for that.",
        "fskv/observe/metrics.py",
        "        if not amount > 0:\n",
        "        if not amount:\n",
        ("tests/unit/test_metrics.py",),
    ),
    # --- tools ------------------------------------------------------------------------------
    Fault(
        "verify-believes-names",
        "`fskv verify` reports a sound file that is not the one its name says.",
        "tools/check/judge.py",
        "        expected.compare(header, chunk)\n",
        "",
        ("tests/tools/test_verify.py",),
    ),
    Fault(
        "import-believes-rows",
        "`fskv import` stores no file whose rows fail their digests.",
        "tools/archive/receive.py",
        "            check_rows(entry.candidate.head.header, entry.candidate.payload)\n",
        "",
        ("tests/tools/test_archive.py",),
    ),
)
