"""Results in place as part of the model: each rank's results heap, and the words about it in the headers.

A receiver may take its result from a block of its heap, and then posts it to every peer. A sender that finds the post
of the round may write there, and marks its flag. Otherwise it writes the slot. Which blocks are warm is left open: each
of the two may decide for the slot. Checks, with faults and without, by the names that violations begin with:

    write to a finished result             the block may belong to a tensor that the user holds
    write to the result of another call    the block is in use for another op or round
    write beyond the result                the block is in use for a result of another size
    write in another layout                the receiver of the chunk has it elsewhere in the result
    result taken from its user             a block that the user holds is given to another call

The user holds a result for as long as he likes, so a write to a free block counts as one to a finished result. He frees
it at the latest moment, when the next call takes its block. tests/protocol/model.py checks what is read in place like
what is read in a slot.
"""

from collections.abc import Callable

from tests.protocol.explorer import Violation
from tests.protocol.scenario import Programs, Scenario, Step
from tests.protocol.state import Moves, Rank, Results, Stamp, State, put, sent, with_word

FREE, HELD, FAILED = (), (1,), (2,)  # a block's use; a call's is (segment, first epoch, last epoch, op, size, layout)
CALL = 6  # words of such a use


class ResultsInPlace:
    def __init__(self, scenario: Scenario, programs: list[Programs], num_segments: int) -> None:
        assert not (scenario.blocks and scenario.device), "a host must drive calls with results in place"
        self.rules, self.num_slots = scenario.rules.results, scenario.rules.num_slots
        self.size, self.num_blocks, self.num_segments = scenario.group_size, scenario.blocks, num_segments
        self.offers, self.programs = scenario.offers, programs
        self.do: dict[str, Callable[[State, int, Rank, Step], Moves]] = {
            "post": self._post,
            "stamp": self._stamp,
            "look": self._look,
            "place": self._place,
            "mark": self._mark,
        }

    def initial(self) -> Results:
        if not self.num_blocks:
            return Results()
        headers = self.num_segments * self.size
        blocks, words = headers * self.num_blocks, headers * self.size
        return Results(
            blocks=(FREE,) * blocks,
            places=((),) * (blocks * self.size),
            posts=((),) * words,
            stamps=((),) * words,
            marks=(0,) * (words * self.num_slots),
        )

    # the receiver

    def entered(self, state: State, r: int, step: Step) -> Moves:
        """The result is in the heap or not. A post that was left from an earlier call stays where it is."""
        yield "", self._past(state, r, ("post", "stamp"))
        use = (step.segment, step.epoch, step.last, step.op, step.size, step.layout)
        forgotten = self.rules.heap_after_reset == "forgotten" and step.segment > 0
        for block in range(self.num_blocks if step.size and r in self.offers else 0):
            at = self._block(step.segment, r, block)
            found = state.results.blocks[at]
            if found == HELD and forgotten:
                raise Violation(f"result taken from its user: rank {r}, block {block}, round {step.epoch}")
            if found in (FREE, HELD) or forgotten:
                yield f", takes block {block}", self._with(state, blocks=(at, use))

    def _post(self, state: State, r: int, rank: Rank, step: Step) -> Moves:
        block = self._own_block(state, r, step)
        if block is None:
            yield ", nothing", self._past(state, r, ("post", "stamp"))
        else:
            yield "", self._with(sent(state, r), posts=(self._word(step.segment, step.other, r), (block, step.size)))

    def _stamp(self, state: State, r: int, rank: Rank, step: Step) -> Moves:
        if self._own_block(state, r, step) is None:
            yield ", nothing", sent(state, r)
        else:
            stamp = step.epoch, step.op, step.layout
            yield "", self._with(sent(state, r), stamps=(self._word(step.segment, step.other, r), stamp))

    def found(self, state: State, r: int, step: Step) -> Stamp | None:
        """The words that src_rank has written in place, or None if its chunk is in the slot."""
        if not self.num_blocks or not self.rules.copies_slots_only:
            return None
        mark = state.results.marks[self._mark_cell(step, r, step.other)]
        if not mark or mark != self._mark_of(step):
            return None
        block = self._own_block(state, r, step)
        return () if block is None else state.results.places[self._cell(step.segment, r, block, step.other)]

    def signalled(self, state: State, r: int, step: Step) -> State:
        state = put(state, r, self._after(state.ranks[r], "signal"))
        return self._released(state, r, step) if self.rules.holds_until == "signal" else state

    def finished(self, state: State, r: int, step: Step) -> State:
        return self._released(state, r, step)

    def _released(self, state: State, r: int, step: Step) -> State:
        """The state where a call that has ended has given its result to the user."""
        if not self.num_blocks or step.epoch != step.last or (block := self._own_block(state, r, step)) is None:
            return state
        return self._with(state, blocks=(self._block(step.segment, r, block), HELD))

    def failed(self, state: State, r: int) -> State:
        for at, use in enumerate(state.results.blocks):
            if len(use) == CALL and at // self.num_blocks % self.size == r:
                state = self._with(state, blocks=(at, FAILED if self.rules.retires else HELD))
        return state

    # the sender

    def _look(self, state: State, r: int, rank: Rank, step: Step) -> Moves:
        """A block may be cold for the sender, which then takes the slot."""
        stamp = state.results.stamps[self._word(step.segment, r, step.other)]
        if stamp and self._matches(stamp, step):
            yield ", finds the post", put(state, r, rank._replace(sent=rank.sent + 1, matched=True))
        yield ", takes the slot", self._past(put(state, r, rank._replace(place=())), r, ("look", "place"))

    def _matches(self, stamp: tuple[int, ...], step: Step) -> bool:
        epoch, op, layout = stamp
        same_epoch = epoch == step.epoch if self.rules.compares_epoch else epoch <= step.epoch
        same_layout = layout == step.layout or not self.rules.compares_layout
        return same_epoch and same_layout and (op == step.op or not self.rules.compares_fingerprint)

    def _place(self, state: State, r: int, rank: Rank, step: Step) -> Moves:
        place = state.results.posts[self._word(step.segment, r, step.other)]
        yield "", put(state, r, rank._replace(sent=rank.sent + 1, place=place))

    def fits(self, rank: Rank, step: Step) -> bool:
        return bool(rank.place) and (rank.place[1] == step.size or not self.rules.compares_size)

    def write(self, state: State, r: int, rank: Rank, step: Step) -> State:
        """A block of a call that has failed takes any write: nobody has it."""
        block = rank.place[0]
        use = state.results.blocks[self._block(step.segment, step.other, block)]
        what = f"rank {r} at rank {step.other}, block {block}, round {step.epoch}"
        if use in (FREE, HELD):
            raise Violation(f"write to a finished result: {what}")
        if use != FAILED:
            segment, first, last, op, size, layout = use
            if (segment, op) != (step.segment, step.op) or not first <= step.epoch <= last:
                raise Violation(f"write to the result of another call: {what}")
            if size != step.size:
                raise Violation(f"write beyond the result: {what}")
            if layout != step.layout:
                raise Violation(f"write in another layout: {what}")
        cell = self._cell(step.segment, step.other, block, r)
        after = put(state, r, rank._replace(sent=rank.sent + 1, place=()))
        return self._with(after, places=(cell, (step.segment, step.epoch, step.op)))

    def past_mark(self, state: State, r: int, rank: Rank) -> State:
        """The state after a chunk has gone into the slot, which has no mark."""
        return self._past(put(state, r, rank._replace(matched=False, place=())), r, ("write", "show", "mark"))

    def _mark(self, state: State, r: int, rank: Rank, step: Step) -> Moves:
        after = put(state, r, self._after(rank._replace(sent=rank.sent + 1), "mark"))
        if not rank.matched:
            yield ", nothing", after
        else:
            yield "", self._with(after, marks=(self._mark_cell(step, step.other, r), self._mark_of(step)))

    def _mark_of(self, step: Step) -> int:
        return {"epoch": step.epoch, "op": step.op + 1, "nothing": 1}[self.rules.mark_names]

    def _after(self, rank: Rank, what: str) -> Rank:
        """The rank after a step of a chunk. With the last one it has done with the post."""
        return rank._replace(matched=False) if what == self.rules.chunk[-1] else rank

    def _past(self, state: State, r: int, what: tuple[str, ...]) -> State:
        """The state after the next steps of what r sends, as far as they are among these."""
        sends, done = self.programs[r].sends, state.ranks[r].sent
        while done < len(sends) and sends[done].what in what:
            done += 1
        return put(state, r, state.ranks[r]._replace(sent=done))

    # words

    def _with(self, state: State, **changed: tuple[int, object]) -> State:
        results = state.results
        words = {name: with_word(getattr(results, name), at, word) for name, (at, word) in changed.items()}
        return state._replace(results=results._replace(**words))

    def _own_block(self, state: State, r: int, step: Step) -> int | None:
        """The block of the call that r is in at this step."""
        for block in range(self.num_blocks):
            use = state.results.blocks[self._block(step.segment, r, block)]
            if len(use) == CALL and use[0] == step.segment and use[1] <= step.epoch <= use[2]:
                return block
        return None

    def _block(self, segment: int, owner: int, block: int) -> int:
        heap = segment if self.rules.heap_after_reset == "new" else 0
        return (heap * self.size + owner) * self.num_blocks + block

    def _cell(self, segment: int, owner: int, block: int, src: int) -> int:
        return self._block(segment, owner, block) * self.size + src

    def _word(self, segment: int, owner: int, src: int) -> int:
        return (segment * self.size + owner) * self.size + src

    def _mark_cell(self, step: Step, owner: int, src: int) -> int:
        slot = step.epoch % self.num_slots
        return ((step.segment * self.size + owner) * self.num_slots + slot) * self.size + src
