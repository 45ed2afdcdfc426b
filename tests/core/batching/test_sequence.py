"""The life of a sequence is the table, and nothing else."""

import dataclasses
from itertools import product

import pytest
from headway_core.batching.sequence import MOVES, IllegalMove, Move, Sequence, State


def in_state(state):
    seq = Sequence(1, 0, 0.0, 5, max_tokens=4)
    seq.state = state
    return seq


@pytest.mark.parametrize(("state", "move"), list(product(State, Move)))
def test_every_move_does_what_the_table_says_and_a_refused_one_changes_nothing(state, move):
    seq = in_state(state)
    before = dataclasses.asdict(seq)
    if (state, move) in MOVES:
        seq.move(move)
        assert seq.state is MOVES[state, move]
        assert dataclasses.asdict(seq) == before | {"state": seq.state}
    else:
        with pytest.raises(IllegalMove, match=state.value):
            seq.move(move)
        assert dataclasses.asdict(seq) == before


def test_every_state_can_be_reached_and_every_one_but_the_last_can_be_left():
    reached = {State.WAITING} | set(MOVES.values())
    assert reached == set(State)
    assert {state for state, _ in MOVES} == set(State) - {State.FINISHED}
    assert {move for _, move in MOVES} == set(Move)


def test_every_state_leads_to_the_end_in_one_move():
    assert all(MOVES[state, Move.FINISH] is State.FINISHED for state in State if state is not State.FINISHED)


@pytest.mark.parametrize(("num_prompt", "max_tokens"), [(0, 1), (-1, 1), (1, 0), (1, -5)])
def test_lengths_below_one_are_refused(num_prompt, max_tokens):
    with pytest.raises(ValueError, match="at least 1"):
        Sequence(1, 0, 0.0, num_prompt, max_tokens=max_tokens)
