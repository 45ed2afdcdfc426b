"""The step-time model against synthetic engines whose true coefficients are known."""

import random
from itertools import pairwise
from statistics import median

import pytest
from headway_core.batching.iteration_plan import IterationShape
from headway_core.latency import StepTimeModel, calibration_shapes
from headway_core.least_squares import nonnegative_least_squares

KNEE = 48
GRID = calibration_shapes(max_num_seqs=64, prefill_token_budget=512, max_model_len=4096, pool_tokens=64 * 2048)


def truth(shape, slower=1.0):
    rows = shape.prefill_tokens + shape.decode_rows
    return slower * (
        0.004
        + 1e-5 * min(rows, KNEE)
        + 1.2e-4 * max(0, rows - KNEE)
        + 1.5e-7 * shape.context_tokens
        + 2e-9 * shape.prefill_pairs
        + 3e-5 * shape.sampled_rows
    )


def calibrated(rng, noise=0.02):
    model = StepTimeModel()
    # Each shape twice; the first time takes ten times as long, as first times do.
    model.calibrate(
        [
            (shape, truth(shape) * (10 if run == 0 else rng.lognormvariate(0, noise)))
            for shape in GRID
            for run in range(2)
        ]
    )
    return model


def chat_traffic(rng, iterations):
    """Context goes up and down with the number of decodes, and an iteration in three carries prefill: what real logs
    look like."""
    for _ in range(iterations):
        rows = rng.randint(2, 24)
        prefill = rng.choice([0, 0, 0, 0, 96, 256])
        yield IterationShape(
            prefill, prefill * prefill // 2, rows, round(rows * rng.uniform(280, 320)), rows + (prefill > 0)
        )


def test_nothing_is_predicted_before_there_is_anything_to_predict_from():
    model = StepTimeModel()
    for _ in range(10):
        model.observe(IterationShape(decode_rows=4, context_tokens=100, sampled_rows=4), 0.01)
    assert model.predict(GRID[0]) is None
    assert model.decode_seconds(4, 100) is None
    assert model.largest_prefill(1.0, 4, 100) is None
    assert model.report() is None
    assert model.relative_error is None
    assert (model.samples, model.max_decode_rows) == (10, 4)


def test_the_grid_varies_rows_context_and_prefill_independently_and_fits_the_pool():
    for shape in GRID:
        start = (shape.prefill_pairs - shape.prefill_tokens**2 // 2) // max(1, shape.prefill_tokens)
        assert shape.context_tokens + 32 * shape.decode_rows + start + shape.prefill_tokens <= 64 * 2048
        assert start + shape.prefill_tokens <= 4096
    decodes = [shape for shape in GRID if not shape.prefill_tokens]
    assert len({shape.decode_rows for shape in decodes}) >= 4
    for rows in {shape.decode_rows for shape in decodes}:
        contexts = {shape.context_tokens for shape in decodes if shape.decode_rows == rows}
        assert max(contexts) > 50 * min(contexts)
    assert max(shape.prefill_tokens for shape in GRID) == 512
    assert any(shape.prefill_tokens and shape.decode_rows for shape in GRID)
    assert len(GRID) <= 24


@pytest.mark.parametrize(
    ("rows", "budget", "length", "pool"),
    [(1, 1, 1, 2), (4, 16, 64, 64), (256, 8192, 131072, 10**6), (2, 10**6, 100, 40)],
)
def test_a_grid_can_be_made_for_any_engine(rows, budget, length, pool):
    grid = calibration_shapes(max_num_seqs=rows, prefill_token_budget=budget, max_model_len=length, pool_tokens=pool)
    assert grid
    for shape in grid:
        assert shape.decode_rows <= rows
        assert shape.prefill_tokens <= budget
        assert shape.context_tokens <= shape.decode_rows * length
        assert shape.decode_rows + shape.prefill_tokens >= 1


def test_known_coefficients_come_back_from_the_grid_alone():
    model = StepTimeModel()
    model.calibrate([(shape, truth(shape)) for shape in GRID])
    report = model.report()
    assert report.knee == pytest.approx(KNEE, rel=0.1)
    assert report.per_row_above == pytest.approx(1.2e-4, rel=0.03)
    assert report.per_context_token == pytest.approx(1.5e-7, rel=0.03)
    assert report.per_prefill_pair == pytest.approx(2e-9, rel=0.03)
    assert all(model.predict(shape) == pytest.approx(truth(shape), rel=0.03) for shape in GRID)


def test_correlated_traffic_with_outliers_does_not_spoil_what_the_grid_knew():
    rng = random.Random(7)
    model = calibrated(rng)
    log = []
    for shape in chat_traffic(rng, 4000):
        seconds = truth(shape) * rng.lognormvariate(0, 0.03) * (rng.uniform(4, 10) if rng.random() < 0.02 else 1)
        model.observe(shape, seconds)
        log.append((shape, seconds))
    far = [
        IterationShape(0, 0, 64, 64 * 2000, 64),
        IterationShape(0, 0, 4, 4 * 4000, 4),
        IterationShape(512, 512 * 256, 32, 32 * 1000, 33),
    ]
    for shape in far:
        assert model.predict(shape) == pytest.approx(truth(shape), rel=0.08)
    assert model.relative_error < 0.05
    assert model.samples == 4000

    # The straight line a + b·p + d·n + e·c through the same log, which the model is there to avoid.
    line = _line(log)
    worst = max(abs(line(shape) / truth(shape) - 1) for shape in far)
    assert worst > 0.3


def _line(log):
    def features(shape):
        return (1.0, shape.prefill_tokens, shape.decode_rows, shape.context_tokens)

    gram = [[sum(features(shape)[i] * features(shape)[j] for shape, _ in log) for j in range(4)] for i in range(4)]
    moment = [sum(features(shape)[i] * seconds for shape, seconds in log) for i in range(4)]
    fitted = nonnegative_least_squares(gram, moment)
    return lambda shape: sum(b * x for b, x in zip(fitted, features(shape), strict=True))


def test_outliers_move_the_prediction_by_less_than_a_percent():
    predictions = []
    for share in (0.0, 0.02):
        rng = random.Random(11)
        model = calibrated(rng)
        for shape in chat_traffic(rng, 3000):
            noise, lot, size = rng.lognormvariate(0, 0.03), rng.random(), rng.uniform(4, 10)
            model.observe(shape, truth(shape) * noise * (size if lot < share else 1))
        predictions.append([model.predict(shape) for shape in chat_traffic(random.Random(3), 50)])
    ratios = [disturbed / clean for clean, disturbed in zip(*predictions, strict=True)]
    assert median(ratios) == pytest.approx(1, abs=0.01)


def observe_errors(model, rng, iterations, slower=1.0, noise=0.03):
    """Runs traffic past the model; the relative errors one step ahead of its predictions, and of its fit without the
    drift."""
    errors, unscaled = [], []
    for shape in chat_traffic(rng, iterations):
        seconds = truth(shape, slower) * rng.lognormvariate(0, noise)
        errors.append(abs(model.predict(shape) / seconds - 1))
        unscaled.append(abs(model._fitted(shape) / seconds - 1))
        model.observe(shape, seconds)
    return errors, unscaled


@pytest.mark.parametrize("noise", [0.03, 0.06])
@pytest.mark.parametrize("slower", [1.5, 0.6])
def test_a_machine_that_turns_slower_or_faster_as_a_whole_is_followed_within_a_hundred_iterations(noise, slower):
    rng = random.Random(5)
    model = calibrated(rng)
    observe_errors(model, rng, 1000, noise=noise)
    for change in (slower, 1.0, slower):
        errors, _ = observe_errors(model, rng, 400, change, noise)
        windows = [median(errors[at : at + 30]) for at in range(60, 371)]
        assert errors[0] > 0.2 and max(windows) < 0.1, "under a tenth from then on"


@pytest.mark.parametrize("noise", [0.01, 0.03, 0.1, 0.2])
def test_following_drift_costs_a_steady_machine_next_to_nothing(noise):
    rng = random.Random(6)
    model = calibrated(rng)
    observe_errors(model, rng, 500, noise=noise)
    errors, unscaled = observe_errors(model, rng, 4000, noise=noise)
    assert median(errors) < 1.05 * median(unscaled)


def test_a_lasting_drift_becomes_part_of_the_fit_and_of_the_report():
    rng = random.Random(5)
    model = calibrated(rng)
    unscaled = [median(observe_errors(model, rng, 300, 1.5)[1]) for _ in range(7)]
    assert unscaled[0] > 0.1 and unscaled[-1] < 0.06
    assert all(later < earlier for earlier, later in pairwise(unscaled[:4]))
    copy = StepTimeModel.from_report(model.report())
    for shape in chat_traffic(rng, 50):
        assert copy.predict(shape) == pytest.approx(model.predict(shape))
        assert copy.predict(shape) == pytest.approx(truth(shape, 1.5), rel=0.05)


def test_the_first_use_of_a_size_is_not_counted_and_later_ones_are():
    model = calibrated(random.Random(2))
    fresh = IterationShape(prefill_tokens=1500, prefill_pairs=1500 * 750, sampled_rows=1)
    before = model.predict(fresh)
    model.observe(fresh, before * 50)
    assert model.relative_error is None
    assert model.predict(fresh) == before
    model.observe(fresh, before)
    assert model.relative_error == pytest.approx(0, abs=1e-9)
    assert model.max_prefill_tokens == 1500


def test_the_error_is_that_of_predictions_made_before_the_iteration_ran():
    model = calibrated(random.Random(4), noise=0.0)
    shape = GRID[6]
    expected = []
    for factor in (1.1, 0.9, 1.3, 1.2, 0.8):
        predicted = model.predict(shape)
        expected.append(abs(predicted - truth(shape) * factor) / (truth(shape) * factor))
        model.observe(shape, truth(shape) * factor)
    assert model.relative_error == pytest.approx(median(expected))


def test_a_published_report_predicts_the_same_and_can_be_refined():
    rng = random.Random(9)
    model = calibrated(rng)
    report = model.report()
    copy = StepTimeModel.from_report(report)
    for shape in [*GRID, *chat_traffic(rng, 50)]:
        assert copy.predict(shape) == pytest.approx(model.predict(shape))
    assert copy.report().knee == report.knee
    for shape in chat_traffic(rng, 3000):
        copy.observe(shape, truth(shape, slower=1.3))
    shape = next(chat_traffic(rng, 1))
    assert copy.predict(shape) == pytest.approx(truth(shape, slower=1.3), rel=0.08)


def test_the_largest_prefill_is_the_largest():
    model = calibrated(random.Random(1))
    for limit, rows, context, start in (
        (0.05, 16, 5000, 0),
        (0.05, 16, 5000, 100_000),
        (0.02, 1, 10, 0),
        (0.5, 64, 100_000, 500),
    ):
        tokens = model.largest_prefill(limit, rows, context, start=start)
        assert tokens > 0

        def seconds(p, rows=rows, context=context, start=start):
            return model.predict(IterationShape(p, p * (2 * start + p) // 2, rows, context, rows + (p > 0)))

        assert seconds(tokens) <= limit < seconds(tokens + 1)
    assert model.largest_prefill(0.001, 16, 5000) == 0
    assert model.largest_prefill(1e9, 16, 5000, at_most=700) == 700


def test_a_time_that_is_no_time_is_refused():
    model = calibrated(random.Random(1))
    for seconds in (0.0, -1.0, float("nan"), float("inf")):
        with pytest.raises(ValueError, match="positive"):
            model.observe(GRID[0], seconds)
    assert model.samples == 0
    with pytest.raises(ValueError, match="at least one"):
        StepTimeModel().calibrate([])


def test_no_coefficient_is_ever_negative_and_the_fit_is_optimal():
    rng = random.Random(13)
    for _ in range(200):
        rows = [[rng.uniform(0, 1) * 10 ** (3 * k) for k in range(4)] for _ in range(12)]
        targets = [rng.gauss(0, 1) for _ in rows]
        gram = [[sum(row[i] * row[j] for row in rows) for j in range(4)] for i in range(4)]
        moment = [sum(row[i] * y for row, y in zip(rows, targets, strict=True)) for i in range(4)]
        fitted = nonnegative_least_squares(gram, moment)
        assert min(fitted) >= 0

        def loss(b, gram=gram, moment=moment):
            return sum(gram[i][j] * b[i] * b[j] for i in range(4) for j in range(4)) / 2 - sum(
                moment[i] * b[i] for i in range(4)
            )

        least = loss(fitted)
        for i in range(4):
            step = 1e-4 / gram[i][i] ** 0.5
            for moved in (fitted[i] + step, max(0.0, fitted[i] - step)):
                assert loss([*fitted[:i], moved, *fitted[i + 1 :]]) >= least - 1e-12


def test_features_that_are_multiples_of_one_another_do_not_break_the_fit():
    rows = [(1.0, 2.0, 0.0), (2.0, 4.0, 0.0), (3.0, 6.0, 0.0)]
    gram = [[sum(row[i] * row[j] for row in rows) for j in range(3)] for i in range(3)]
    moment = [sum(row[i] * 5.0 * row[0] for row in rows) for i in range(3)]
    fitted = nonnegative_least_squares(gram, moment)
    assert fitted[0] + 2 * fitted[1] == pytest.approx(5.0)
    assert fitted[2] == 0
