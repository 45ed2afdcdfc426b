"""The example in the package's docstring is true."""

import doctest

import headway_core.admission


def test_the_example_in_the_docstring_runs_as_it_is_printed():
    done = doctest.testmod(headway_core.admission)
    assert (done.failed, done.attempted > 10) == (0, True)
