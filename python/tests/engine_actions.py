"""What a test's engine can be told to do. Runs in the engine's process, where scheduler and worker are (but for tensor parallelism)."""

import hashlib
import struct
import threading
import time

from kvferry import _native


def _sampling(count, params=None):
    from vllm import SamplingParams

    extra = {"kv_transfer_params": params} if params else None
    return SamplingParams(temperature=0, max_tokens=count, ignore_eos=True, extra_args=extra)


def generate(llm, prompts, count, params=None, salt=None, lora=None):
    from vllm.lora.request import LoRARequest

    inputs = [{"prompt_token_ids": p, **({"cache_salt": salt} if salt else {})} for p in prompts]
    started = time.monotonic()
    request = LoRARequest(*lora) if lora else None
    outputs = llm.generate(inputs, _sampling(count, params), use_tqdm=False, lora_request=request)
    seconds = time.monotonic() - started
    return [
        {
            "tokens": list(o.outputs[0].token_ids),
            "cached": o.num_cached_tokens,
            "params": o.kv_transfer_params,
            "reason": o.outputs[0].finish_reason,
            "seconds": seconds,
        }
        for o in outputs
    ]


def reset(llm, connector=False):
    return llm.llm_engine.reset_prefix_cache(False, connector)


def metrics(llm):
    """Our counters since the start, by name and label; and how often vLLM preempted."""
    drain(llm)
    values = {}
    for m in llm.get_metrics():
        if m.name.startswith("vllm:kvferry_"):
            labels = [v for k, v in m.labels.items() if k not in ("model_name", "engine")]
            values[":".join([m.name.removeprefix("vllm:kvferry_"), *labels])] = m.value
        elif m.name == "vllm:num_preemptions":
            values["preemptions"] = m.value
    return values


def drain(llm):
    """Runs one short request, so that what the workers have to report comes out."""
    generate(llm, [[5, 6, 7]], 1)


def connectors(llm):
    from vllm.distributed.kv_transfer import get_kv_transfer_group

    return llm.llm_engine.engine_core.engine_core.scheduler.connector, get_kv_transfer_group()


def attached(llm):
    scheduler, worker = connectors(llm)
    return all(side._session.attachment is not None for side in (scheduler._scheduler, worker._worker))


def wait_attached(llm, timeout_s=15.0):
    _poll(lambda: attached(llm), timeout_s)


def wait_space(llm, timeout_s=15.0):
    """Until the daemon has told both sides the id of the present space; a step carries it to the worker first."""
    drain(llm)
    scheduler, worker = connectors(llm)

    def known():
        return all(side._session.space_id(side._generation) for side in (scheduler._scheduler, worker._worker))

    _poll(known, timeout_s)


def wait_heard(llm, timeout_s=15.0):
    """Until a look-up was answered in time."""
    matcher = connectors(llm)[0]._scheduler._matcher
    _poll(lambda: not matcher._silent, timeout_s)


def wait_stored(llm, timeout_s=20.0):
    """Until no store of this rank is under way."""
    worker = connectors(llm)[1]._worker

    def done():
        attachment = worker._session.attachment
        return attachment is None or not attachment._operations

    _poll(done, timeout_s)


def _poll(condition, timeout_s):
    deadline = time.monotonic() + timeout_s
    while not condition():
        if time.monotonic() > deadline:
            raise TimeoutError("the condition did not come")
        time.sleep(0.01)


# ---- what lies in blocks, and what goes wrong with them ----

# By hash: what was computed at different times or beside other requests may differ in its last bits.
_stored: dict[bytes, set[bytes]] = {}
_checks = {"stored": 0, "loaded": 0, "wrong": 0, "unknown": 0}


def _content(memory, block_id):
    digest = hashlib.sha256()
    for p in memory.planes:
        at = p.base + block_id * p.stride
        digest.update(memoryview(memory.memory)[at : at + p.bytes])
    return digest.digest()


def watch_bytes(llm):
    """From now on every block's content is noted when it is handed to a store, and compared when the block was loaded."""
    from kvferry.vllm import loader as loader_module

    worker = connectors(llm)[1]._worker
    start_store, loaded = worker._start_store, loader_module.Loader._loaded

    def noting(job):
        for i, block_id in enumerate(job.block_ids):
            _stored.setdefault(job.hashes[32 * i : 32 * i + 32], set()).add(_content(worker._memory, block_id))
            _checks["stored"] += 1
        start_store(job)

    def comparing(self, load, indices, source):
        loaded(self, load, indices, source)
        for i in indices:
            name = load.job.hashes[32 * i : 32 * i + 32]
            _checks["loaded"] += 1
            if name not in _stored:
                _checks["unknown"] += 1
            elif _content(self._memory, load.job.block_ids[i]) not in _stored[name]:
                _checks["wrong"] += 1

    worker._start_store = noting
    loader_module.Loader._loaded = comparing


# Hash and digest, as hexadecimal digits.
_noted: set[tuple[str, str]] = set()
_loaded: list[tuple[str, str]] = []


def watch_handoffs(llm):
    """From now on every block's content is noted when it is handed to a store or offered, and when a load of it is reported as ended."""
    from kvferry.vllm import loader as loader_module

    scheduler, worker = connectors(llm)
    offers, memory = scheduler._scheduler._offers, worker._worker._memory
    start_store, finish, settle = worker._worker._start_store, offers.finish, loader_module.Loader._settle

    def note(into, block_ids, names):
        for block_id, name in zip(block_ids, names):
            into((name.hex(), _content(memory, block_id).hex()))

    def noting_stores(job):
        note(_noted.add, job.block_ids, [job.hashes[i : i + 32] for i in range(0, len(job.hashes), 32)])
        start_store(job)

    def noting_offers(request, block_ids, *rest):
        note(_noted.add, block_ids, request.block_hashes)
        return finish(request, block_ids, *rest)

    def noting_loads(self, load):
        # Before the engine hears of it, and may write there.
        if load.decided() and not [op for op in load.lending if not op.quiet()] and self._loads.get(load.job.request_id) is load:
            came = [i for i in range(len(load.job.block_ids)) if i not in load.missing]
            note(_loaded.append, [load.job.block_ids[i] for i in came], [load.job.hashes[32 * i : 32 * i + 32] for i in came])
        settle(self, load)

    worker._worker._start_store, offers.finish, loader_module.Loader._settle = noting_stores, noting_offers, noting_loads


def noted_contents(llm):
    return sorted(_noted)


def loaded_contents(llm):
    return _loaded


def step_handing(llm, times):
    """So many steps, or until nothing is left to do; the requests that ended, with their parameters."""
    ended = []
    scheduler = llm.llm_engine.engine_core.engine_core.scheduler
    for _ in range(times):
        if not llm.llm_engine.has_unfinished_requests() and not scheduler.has_finished_requests():
            break
        for o in llm.llm_engine.step():
            if o.finished:
                params = o.kv_transfer_params
                if params:
                    params.pop("remote_prefill_cached_tokens", None)
                ended.append({"id": o.request_id, "params": params})
    return ended


def checks(llm):
    return _checks


def fail_loads(llm, every):
    """From now on every n-th block's load out of the pool finds a wrong checksum."""
    count = 0
    load_blocks = _native.load_blocks

    def failing(dst, planes, ids, pool, ready, offsets, headers, generations, crcs, threads):
        nonlocal count
        spoiled = bytearray(crcs.tobytes())
        for i in range(len(ids)):
            if ready[i]:
                count += 1
                if count % every == 0:
                    struct.pack_into("<I", spoiled, 4 * i, crcs[i] ^ 1)
        return load_blocks(dst, planes, ids, pool, ready, offsets, headers, generations, bytes(spoiled), threads)

    _native.load_blocks = failing


# ---- steps taken one at a time ----


def submit(llm, request_id, prompt, count, params=None):
    llm.llm_engine.add_request(request_id, {"prompt_token_ids": prompt}, _sampling(count, params))


def step_until_loading(llm, timeout_s=10.0):
    """Steps until a load was begun."""
    scheduler = connectors(llm)[0]._scheduler
    deadline = time.monotonic() + timeout_s
    while not scheduler._loads:
        if time.monotonic() > deadline:
            raise TimeoutError("no load was begun")
        llm.llm_engine.step()


def abort(llm, request_id):
    core = llm.llm_engine
    core.abort_request([request_id])


def run_out(llm, timeout_s=60.0):
    """Steps until no request is left; tokens by request, and the longest step in seconds."""
    deadline = time.monotonic() + timeout_s
    tokens, longest = {}, 0.0
    scheduler = llm.llm_engine.engine_core.engine_core.scheduler
    while llm.llm_engine.has_unfinished_requests() or scheduler.has_finished_requests():
        if time.monotonic() > deadline:
            raise TimeoutError("requests are left")
        started = time.monotonic()
        for output in llm.llm_engine.step():
            if output.finished:
                tokens[output.request_id] = list(output.outputs[0].token_ids)
        longest = max(longest, time.monotonic() - started)
    return {"tokens": tokens, "longest_step": longest}


def free_blocks(llm):
    """Blocks that no request holds; one more, the null block, is always taken."""
    return llm.llm_engine.engine_core.engine_core.scheduler.kv_cache_manager.block_pool.get_num_free_blocks()


def step_for(llm, seconds):
    """Steps as an engine's own loop would, while it waits for what is under way."""
    until = time.monotonic() + seconds
    while time.monotonic() < until:
        llm.llm_engine.step()
        time.sleep(0.001)


def refuse_stores(llm):
    """From now on nothing comes into the pool."""
    from kvferry.attachment import Refusal

    def refuse(job):
        raise Refusal("told")

    connectors(llm)[1]._worker._start_store = refuse


def hand_over(llm, direct):
    """From now on handoffs go out of and into the engine's own memory, or by way of the pools."""
    from kvferry.vllm.handoff import REGION

    scheduler, worker = (side for side in connectors(llm))
    scheduler._scheduler._offers._table = scheduler._scheduler._table if direct else None
    scheduler._scheduler._direct = direct
    worker._worker._loader._lends = REGION if direct else 0


_load_seconds = 0.0


def watch_loads(llm):
    """From now on the time that loads take is added up: vLLM rounds it."""
    tallies = connectors(llm)[1]._worker._loader._tallies
    add = tallies.add

    def noting(name, n=1, label=""):
        global _load_seconds
        if name == "load_seconds":
            _load_seconds += n
        add(name, n, label)

    tallies.add = noting


def load_seconds(llm):
    return _load_seconds


def complete(llm, prompt, count, params=None):
    """One request, stepped as an engine's own loop does: a millisecond between steps that have nothing to compute."""
    submit(llm, "complete", prompt, count, params)
    while llm.llm_engine.has_unfinished_requests():
        outputs = llm.llm_engine.step()
        for o in outputs:
            if o.finished:
                return {"tokens": list(o.outputs[0].token_ids), "cached": o.num_cached_tokens, "params": o.kv_transfer_params}
        if not outputs:
            time.sleep(0.001)


def let_holds_go(llm):
    """As if all that is kept for offers had been kept long enough."""
    for held in connectors(llm)[1]._worker._holds.values():
        held.spill_at = 0


def unended(llm):
    """Requests that were aborted or have finished and keep their blocks, and loads that have not ended."""
    scheduler = llm.llm_engine.engine_core.engine_core.scheduler
    return {"kept": len(scheduler.requests), "loads": len(connectors(llm)[0]._scheduler._loads)}


def leftovers(llm):
    """What the connector still remembers of requests: must be nothing when they are gone."""
    drain(llm)
    scheduler, worker = (side for side in connectors(llm))
    s, w = scheduler._scheduler, worker._worker
    return {
        "requests": len(s._requests),
        "loads": len(s._loads),
        "reads": len(s._reads._unfinished),
        "stores": len(w._stores),
        "holds": len(w._holds) + len(s._holds),
        "unquiet": len(w._loader._loads),
    }


_go = None


def hold_loads(llm):
    """Loads stop before they copy, until let_loads_go."""
    global _go
    _go = threading.Event()

    def held(copy):
        def wait(*args):
            assert _go.wait(60)
            return copy(*args)

        return wait

    _native.load_blocks, _native.load_lent = held(_native.load_blocks), held(_native.load_lent)


def let_loads_go(llm):
    _go.set()


def step(llm, times=1):
    """So many steps, or until nothing is left to do; the ids of requests that ended."""
    ended = []
    for _ in range(times):
        if not llm.llm_engine.has_unfinished_requests():
            break
        ended += [o.request_id for o in llm.llm_engine.step() if o.finished]
    return ended


# ---- drives ----


def set_load_timeout(llm, ms):
    import dataclasses

    scheduler = connectors(llm)[0]._scheduler
    scheduler._config = dataclasses.replace(scheduler._config, load_timeout_ms=ms)


def set_pace(llm, block_us):
    """From now on the engine says that a block takes so long to compute."""
    pace = connectors(llm)[0]._scheduler._pace
    pace._block_s, pace.step_ended = block_us / 1e6, lambda: None


def press(llm, seconds, seed, shared, own, at_once, count):
    """Requests side by side, as many as at_once, for so long. A prompt begins with one of the shared parts and goes on with one of that part's own.

    What became of them by reason, blocks asked for, and the longest step.
    """
    import random

    rng = random.Random(seed)
    engine, scheduler = llm.llm_engine, llm.llm_engine.engine_core.engine_core.scheduler
    reasons, alive, number, longest = {}, 0, 0, 0.0
    recent = []
    until = time.monotonic() + seconds
    while alive or scheduler.has_finished_requests() or time.monotonic() < until:
        while alive < at_once and time.monotonic() < until:
            if recent and rng.random() < 0.4:  # the next turn of a conversation
                prompt = rng.choice(recent)
            else:
                i = rng.randrange(len(shared))
                prompt = shared[i] + own[i][rng.randrange(len(own[i]))]
            recent = [*recent[-20:], prompt]
            submit(llm, f"p{seed}-{number}", prompt, count)
            number, alive = number + 1, alive + 1
        started = time.monotonic()
        for output in engine.step():
            if output.finished:
                reason = output.outputs[0].finish_reason
                if len(output.outputs[0].token_ids) != count:
                    reason = f"{reason} after {len(output.outputs[0].token_ids)} tokens"
                reasons[reason] = reasons.get(reason, 0) + 1
                alive -= 1
        longest = max(longest, time.monotonic() - started)
    return {"reasons": reasons, "requests": number, "longest_step": longest}


def set_prefetches(llm, most):
    from kvferry.vllm import scheduler

    scheduler.COMING_MAX = most


def time_to_first_token_behind(llm, ahead, prompt, count):
    """Two requests, of which the second waits for the first: seconds from the first one's end to the second one's first token, and the second one's tokens."""
    submit(llm, "ahead", ahead, count)
    llm.llm_engine.step()
    submit(llm, "behind", prompt, 2)
    done = first = None
    out = []
    while llm.llm_engine.has_unfinished_requests():
        outputs = llm.llm_engine.step()
        for o in outputs:
            if o.request_id.startswith("ahead") and o.finished:
                done = time.monotonic()
            if o.request_id.startswith("behind") and o.outputs[0].token_ids:
                first = first or time.monotonic()
                out = list(o.outputs[0].token_ids)
        if not outputs:
            time.sleep(0.001)
    return {"seconds": first - done, "tokens": out}


# ---- idle mode ----


def watch_idle(llm):
    """From now on every block's content is noted when its request ends, before anything can write there again, and compared when the block was loaded."""
    from kvferry.vllm import loader as loader_module

    scheduler, worker = (side for side in connectors(llm))
    becomes_idle, loaded = scheduler._scheduler._becomes_idle, loader_module.Loader._loaded

    def noting(state, block_ids, held):
        request = state.request
        for block_id, name in zip(block_ids[: request.num_computed_tokens // 128], request.block_hashes):
            _stored.setdefault(name, set()).add(_content(worker._worker._memory, block_id))
            _checks["stored"] += 1
        becomes_idle(state, block_ids, held)

    def comparing(self, load, indices, source):
        loaded(self, load, indices, source)
        for i in indices:
            name = load.job.hashes[32 * i : 32 * i + 32]
            _checks["loaded"] += 1
            if name not in _stored:
                _checks["unknown"] += 1
            elif _content(self._memory, load.job.block_ids[i]) not in _stored[name]:
                _checks["wrong"] += 1

    scheduler._scheduler._becomes_idle = noting
    loader_module.Loader._loaded = comparing


def set_idle(llm, seconds, gives_back):
    idle = connectors(llm)[0]._scheduler._idle
    idle._idle_s, idle.gives_back = seconds, gives_back


def pass_time(llm, seconds):
    """For idle blocks it is so much later."""
    scheduler, worker = connectors(llm)
    stores = worker._worker._idle
    with stores._changed:
        scheduler._scheduler._idle._clock = stores._clock = lambda: time.monotonic() + seconds
        stores._changed.notify()


def pool_blocks(llm):
    """Of the engine's own pool: blocks that no request holds, and blocks that its prefix cache can find."""
    pool = llm.llm_engine.engine_core.engine_core.scheduler.kv_cache_manager.block_pool
    return {"free": pool.get_num_free_blocks(), "with_content": sum(b.block_hash is not None for b in pool.blocks)}


def idle_blocks(llm):
    """Blocks that wait for their time or are being read, on either side."""
    scheduler, worker = connectors(llm)
    stores = worker._worker._idle
    with stores._changed:
        return {"scheduler": len(scheduler._scheduler._idle), "waiting": len(stores._waiting), "running": len(stores._running)}
