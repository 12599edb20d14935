"""What a frontend learns of step times from load reports."""

from __future__ import annotations

import random
from statistics import median

import pytest

from dynamo.common.kv.events import NO_STEPS, StepTotals
from dynamo.common.names import InstanceId
from dynamo.frontend.router.cost.step_model import StepModel

ME = InstanceId(1)
FAST_GPU = (2e-3, 0.01e-3, 0.02e-3, 1e-6)
CPU = (60e-3, 5e-3, 2e-3, 1e-5)


class Engine:
    """Makes steps of random batches whose duration is a linear function of them, with noise."""

    def __init__(self, times: tuple[float, float, float, float], *, noise: float = 0.1, outliers: float = 0.0) -> None:
        self.totals = NO_STEPS
        self._times = times
        self._noise = noise
        self._outliers = outliers
        self._rng = random.Random(1)

    def batch(self) -> tuple[int, int, int]:
        tokens = self._rng.choice([0, 0, 0, self._rng.randint(1, 8192)])
        sequences = self._rng.randint(0, 60)
        return tokens, sequences, sequences * 15 + self._rng.randint(0, 100)

    def step_s(self, batch: tuple[int, int, int]) -> float:
        base, token, sequence, block = self._times
        return base + token * batch[0] + sequence * batch[1] + block * batch[2]

    def run(self, steps: int) -> StepTotals:
        for _ in range(steps):
            batch = self.batch()
            seconds = self.step_s(batch) * max(0.05, self._rng.gauss(1.0, self._noise))
            if self._rng.random() < self._outliers:
                seconds *= 50
            self.totals += StepTotals(1, seconds, *batch)
        return self.totals


def learn(model: StepModel, engine: Engine, reports: int) -> None:
    for _ in range(reports):
        model.report(ME, engine.run(4), float(model.observations))


def error(model: StepModel, engine: Engine) -> float:
    """Return the median relative error of predicted steps."""
    times = model.times
    errors = []
    for _ in range(200):
        batch = engine.batch()
        predicted = times.step_s(*batch[1:]) + times.token * batch[0]
        errors.append(abs(predicted / engine.step_s(batch) - 1.0))
    return median(errors)


@pytest.mark.parametrize("times", [FAST_GPU, CPU])
def test_fifty_reports_are_enough_to_predict_steps_of_unlike_hardware(times: tuple[float, float, float, float]) -> None:
    model, engine = StepModel(), Engine(times)
    learn(model, engine, 50)
    assert error(model, engine) < 0.1


def test_steps_that_take_fifty_times_as_long_now_and_then_hardly_count() -> None:
    model, engine = StepModel(), Engine(CPU, noise=0.2, outliers=0.02)
    learn(model, engine, 500)
    assert error(model, engine) < 0.15


def test_an_engine_that_becomes_slower_is_learned_anew() -> None:
    model = StepModel()
    learn(model, Engine(FAST_GPU), 300)
    slow = Engine(CPU)
    slow.totals = StepTotals(10**6, 10.0**6)
    learn(model, slow, 200)
    assert error(model, slow) < 0.2


def test_coefficients_never_fall_below_zero() -> None:
    model = StepModel()
    totals = NO_STEPS
    rng = random.Random(3)
    for number in range(300):
        totals += StepTotals(1, rng.uniform(0.001, 1.0), rng.randint(0, 9000), rng.randint(0, 99), rng.randint(0, 999))
        model.report(ME, totals, float(number))
        assert min(model.times.base, model.times.token, model.times.sequence, model.times.block) >= 0.0


def test_prompts_never_seen_are_taken_to_be_as_much_slower_as_the_rest() -> None:
    model, totals = StepModel(), NO_STEPS
    before = model.times
    for number in range(100):
        totals += StepTotals(10, 10 * 0.06, 0, 0)  # ten times the typical base
        model.report(ME, totals, float(number))
    assert model.times.base == pytest.approx(10 * before.base, rel=0.1)
    assert model.times.token == pytest.approx(10 * before.token, rel=0.2)


def test_lost_reports_and_restarts_do_no_harm() -> None:
    model, engine = StepModel(), Engine(FAST_GPU)
    learn(model, engine, 50)
    engine.run(400)  # no report of these arrives
    learn(model, engine, 10)
    assert error(model, engine) < 0.1
    observations = model.observations
    engine.totals = NO_STEPS
    learn(model, engine, 1)
    assert model.observations == observations, "totals that went back belong to another run"
    assert not model.report(ME, engine.totals, 1e9), "nothing new in it"


@pytest.mark.parametrize(("steps", "seconds"), [(1, 1e-300), (1, 5e-324), (2**52, 1e-300), (2**52, 1e-3)])
def test_steps_that_no_engine_could_make_teach_nothing(steps: int, seconds: float) -> None:
    model, engine, liar = StepModel(), Engine(FAST_GPU), InstanceId(2)
    model.report(liar, StepTotals(1, 5e-324), 0.0)
    assert not model.report(liar, StepTotals(1 + steps, seconds + 5e-324), 1.0)
    learn(model, engine, 50)
    assert error(model, engine) < 0.1


def test_the_mean_output_follows_what_finishes() -> None:
    model, totals = StepModel(), StepTotals(1, 0.01)
    model.report(ME, totals, 0.0)
    for number in range(1, 400):
        totals += StepTotals(1, 0.01, 0, 1, 0, 2, 2 * 50)
        model.report(ME, totals, float(number))
    assert model.times.output_tokens == pytest.approx(50.0, rel=0.05)


def test_a_thousand_reports_within_a_moment_are_thinned_out() -> None:
    model, engine = StepModel(), Engine(FAST_GPU)
    learn(model, engine, 70)
    learned = sum(model.report(ME, engine.run(1), 1000.0) for _ in range(1000))
    assert learned == 1
