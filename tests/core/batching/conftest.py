"""A tiny engine around the scheduler, whose "model" really reads its cache: a wrong block gives wrong tokens.

The cached content of position i is a hash of the content of position i - 1, read through the block table, and token i.
The next token is a hash of all contents up to the last position. So the output of every sequence can be compared with
what `oracle` computes without any blocks, and whatever was shared, cut, evicted, recomputed or overwritten wrongly
shows.
"""

import zlib
from collections import Counter, deque

import pytest
from headway_core.batching.digests import extend_digests
from headway_core.batching.iteration_plan import EventKind, ItemResult, IterationResult
from headway_core.batching.scheduler import Scheduler
from headway_core.batching.sequence import Sequence, State
from headway_core.contract.policy import Knobs

VOCABULARY = 50


def content(before, token):
    return zlib.crc32(b"%d,%d" % (before, token))


def next_token(contents):
    return zlib.crc32(repr(contents).encode()) % VOCABULARY


def oracle(prompt, length):
    """The `length` tokens that follow the prompt."""
    contents, tokens = [], list(prompt)
    for position in range(len(prompt) + length - 1):
        contents.append(content(contents[-1] if contents else 0, tokens[position]))
        if position == len(tokens) - 1:
            tokens.append(next_token(contents))
    return tokens[len(prompt) :]


class Slot:
    def __init__(self, seq_id, epoch, tokens):
        self.seq_id, self.epoch, self.tokens = seq_id, epoch, tokens
        self.table = []
        self.end = None  # tokens computed or hit so far, in this epoch


class Engine:
    """Owner and executor in one. `depth` plans may be in flight; each is executed when it is collected."""

    def __init__(self, *, blocks, block_size, max_num_seqs=8, budget=64, depth=1, **options):
        self.scheduler = Scheduler(
            num_blocks=blocks, block_size=block_size, knobs=Knobs(max_num_seqs, budget), **options
        )
        self.block_size, self.depth = block_size, depth
        self.now = 0.0
        self.cache = {}  # (block, offset) → content
        self.slots = {}
        self.known = {}  # seq_id → all tokens, for those that are here
        self.lengths = {}  # seq_id → output length after which it ends by itself
        self.outputs = {}
        self.prompts = {}
        self.sequences = {}
        self.finished = set()
        self.cancelled = set()
        self.flying = deque()
        self.seen = Counter()
        self.victims = []  # (seq_id, computed, prefill_end, outputs, plan_id)
        self.plans = []
        self.launches = 0
        self.ids = iter(range(10**9))

    # ---- owner

    def add(self, prompt, *, length=None, max_tokens=None, priority=0, group=None, arrival=None, **options):
        """`prompt` is a list of tokens or their number; ends after `length` tokens, or at max_tokens."""
        seq_id = next(self.ids)
        if isinstance(prompt, int):
            prompt = [(seq_id * 7 + i) % VOCABULARY for i in range(prompt)]
        seq = Sequence(
            seq_id,
            priority,
            self.now if arrival is None else arrival,
            len(prompt),
            max_tokens=max_tokens,
            group=group,
            **options,
        )
        extend_digests(seq.digests, prompt, self.block_size)
        self.scheduler.add(seq, self.now)
        self.known[seq_id] = list(prompt)
        self.prompts[seq_id] = list(prompt)
        self.lengths[seq_id] = length
        self.outputs[seq_id] = []
        self.sequences[seq_id] = seq
        return seq

    def cancel(self, seq):
        assert self.scheduler.cancel(seq.seq_id, self.now)
        self.cancelled.add(seq.seq_id)
        self.known.pop(seq.seq_id)

    def launch(self):
        """One `schedule`; the plan, or None."""
        before = {
            seq.seq_id: (
                seq.num_computed,
                seq.num_inflight,
                seq.prefill_end,
                seq.num_outputs,
                seq.preemptions,
                seq.state,
            )
            for seq in self.alive()
        }
        running = self.scheduler.load().running
        plan = self.scheduler.schedule(self.now)
        self.launches += 1
        if self.launches % 3 == 0:  # what goes wrong in the state stays wrong
            self.scheduler.check()
        for seq in self.alive():
            computed, inflight, end, outputs, preemptions, _ = before[seq.seq_id]
            if seq.preemptions > preemptions:
                self.victims.append((seq.seq_id, computed, end, outputs, plan and plan.plan_id))
                self.seen["mid-prefill"] += 0 < computed < end
                self.seen["after the first token"] += outputs == 1
                self.seen["on a block boundary"] += computed > 0 and computed % self.block_size == 0
                self.seen["with work in flight"] += inflight > 0
        self.check_limits(running)
        if plan is not None:
            self.check_plan(plan, before)
            bound = {
                (item.seq_id, item.epoch): list(self.known[item.seq_id])
                for item in plan.items
                if len(item.new_blocks) and (item.seq_id, item.epoch) not in self.bound()
            }
            self.flying.append((plan, bound))
            self.plans.append(plan)
        return plan

    def bound(self):
        """(sequence, epoch) of all slots, those included that plans in flight will bind."""
        bound = {(slot.seq_id, slot.epoch) for slot in self.slots.values()}
        return bound.union(*(known for _, known in self.flying)) if self.flying else bound

    def collect(self):
        """Executes the oldest plan in flight and completes it; returns the events."""
        plan, bound = self.flying.popleft()
        sampled = self.execute(plan, bound)
        for seq_id, tokens in self.known.items():
            extend_digests(self.sequences[seq_id].digests, tokens, self.block_size)
        outcomes = []
        for (seq_id, epoch), token in sampled.items():
            length, produced = self.lengths[seq_id], len(self.outputs[seq_id]) + 1
            outcomes.append(ItemResult(seq_id, epoch, length is not None and produced >= length))
            assert 0 <= token < VOCABULARY
        self.now += 1.0
        events = self.scheduler.complete(IterationResult(plan.plan_id, tuple(outcomes), None), self.now)
        newest = {seq_id: token for (seq_id, epoch), token in sampled.items()}
        for kind, seq_id in events:
            if kind is EventKind.TOKEN:
                self.outputs[seq_id].append(newest[seq_id])
                self.known[seq_id].append(newest[seq_id])
            elif kind is EventKind.FINISHED:
                self.finished.add(seq_id)
                self.known.pop(seq_id)
            else:
                self.seen["preempted events"] += 1
        return events

    def step(self):
        """Launches as many plans as the depth allows, then collects one; False when there was nothing to do."""
        while len(self.flying) < self.depth and self.launch() is not None:
            pass
        if not self.flying:
            return False
        self.collect()
        return True

    def run(self, most=20_000):
        """Until nothing is left to do; returns the iterations that took."""
        for steps in range(most):
            if not self.step():
                assert not len(self.scheduler), "the engine idles and somebody waits"
                return steps
        raise AssertionError(f"not at the end after {most} iterations")

    def alive(self):
        return [seq for seq_id, seq in self.sequences.items() if seq_id in self.known]

    def running(self):
        return [seq for seq in self.alive() if seq.state is State.RUNNING]

    # ---- executor

    def execute(self, plan, bound):
        sampled = {}
        for slot in plan.freed_slots:
            self.slots.pop(slot, None)
        for item in plan.items:
            key = (item.seq_id, item.epoch)
            if key in bound:
                assert item.slot not in self.slots, "a slot is bound twice"
                self.slots[item.slot] = Slot(item.seq_id, item.epoch, bound[key])
                assert item.start % self.block_size == 0
                self.slots[item.slot].end = item.start
            slot = self.slots[item.slot]
            assert (slot.seq_id, slot.epoch) == key, "a slot holds another sequence"
            assert item.start == slot.end, "tokens are computed once, one after the other"
            slot.end += item.count
            slot.table += item.new_blocks
            assert len(set(slot.table)) == len(slot.table)
            contents = [self.read(slot, position) for position in range(item.start)]
            for position in range(item.start, item.start + item.count):
                contents.append(content(contents[-1] if contents else 0, slot.tokens[position]))
                self.cache[slot.table[position // self.block_size], position % self.block_size] = contents[-1]
            if item.samples:
                assert slot.end == len(slot.tokens), "only the last known token is sampled after"
                sampled[key] = next_token(contents)
                slot.tokens.append(sampled[key])
        return sampled

    def read(self, slot, position):
        return self.cache[slot.table[position // self.block_size], position % self.block_size]

    # ---- what must hold of every plan

    def check_limits(self, running_before):
        running = self.scheduler.load().running
        assert running == len(self.running())
        assert running <= max(self.scheduler.max_num_seqs, running_before)

    def check_plan(self, plan, before):
        prefills = [item for item in plan.items if item.start < self.sequences[item.seq_id].prefill_end]
        decodes = [item for item in plan.items if item.start >= self.sequences[item.seq_id].prefill_end]
        assert sum(item.count for item in prefills) == plan.shape.prefill_tokens
        assert plan.shape.prefill_tokens <= min(self.scheduler.prefill_token_budget, plan.prefill_budget)
        assert plan.shape.decode_rows == len(decodes)
        assert plan.shape.context_tokens == sum(item.start + 1 for item in decodes)
        assert plan.shape.prefill_pairs == sum(item.count * (2 * item.start + item.count) for item in prefills) // 2
        assert plan.shape.sampled_rows == sum(item.samples for item in plan.items)
        assert len({item.seq_id for item in plan.items}) == len(plan.items), "a sequence is in it twice"
        assert len({item.slot for item in plan.items}) == len(plan.items), "a slot is in it twice"
        self.check_decodes_are_in(plan, before)
        self.check_order(plan, before)
        self.check_reuse(plan)

    def check_decodes_are_in(self, plan, before):
        here = {item.seq_id for item in plan.items}
        if self.depth == 1:
            for seq in self.running():
                computed, _, end, _, _, state = before[seq.seq_id]
                if state is State.RUNNING and computed >= end:
                    assert seq.seq_id in here, "a running decode is not in the iteration"

    def check_order(self, plan, before):
        """Nobody starts before one that goes first and waits, except those that were evicted in this very plan."""
        policy, waiting = self.scheduler.policy, self.scheduler._state.waiting
        passed_over = [
            policy.order(seq)
            for seq in self.alive()
            if seq.seq_id in waiting and seq.preemptions == before[seq.seq_id][4] and not seq.promoted
        ]
        bound = self.bound()
        for item in plan.items:
            seq = self.sequences[item.seq_id]
            if (item.seq_id, item.epoch) not in bound:
                assert all(policy.order(seq) < key for key in passed_over), "somebody started out of order"

    def check_reuse(self, plan):
        """What this plan writes is not read or written for anybody else by the plans in flight."""
        touched = {}
        tables = {(slot.seq_id, slot.epoch): list(slot.table) for slot in self.slots.values()}
        for flying, _ in self.flying:
            for item in flying.items:
                table = tables.setdefault((item.seq_id, item.epoch), [])
                table += item.new_blocks
                for block in table:
                    touched.setdefault(block, set()).add((item.seq_id, item.epoch))
        for item in plan.items:
            hits = item.start // self.block_size if (item.seq_id, item.epoch) not in tables else 0
            for block in item.new_blocks[hits:]:
                assert touched.get(block, set()) <= {(item.seq_id, item.epoch)}, "a block in flight is used again"

    def check_end(self):
        """All finished as they should, everything was given back."""
        for seq_id, outputs in self.outputs.items():
            expected = oracle(self.prompts[seq_id], max(1, len(outputs)))[: len(outputs)]
            assert outputs == expected, f"sequence {seq_id} got wrong tokens"
            if seq_id in self.cancelled:
                continue
            assert seq_id in self.finished, f"sequence {seq_id} did not finish"
            seq = self.sequences[seq_id]
            ends = [end for end in (self.lengths[seq_id], seq.most_tokens - seq.num_prompt) if end is not None]
            assert len(outputs) == min(ends)
        self.scheduler.check()
        load = self.scheduler.load()
        assert (load.running, load.waiting, load.classes) == (0, 0, ())
        assert load.free_blocks == self.scheduler.total_blocks
        assert load.free_slots == self.scheduler.max_num_seqs


@pytest.fixture
def engine():
    """Makes engines: engine(blocks=…, block_size=…, …)."""
    return Engine
