"""Statistics of instances, added up."""

from dynamo.frontend.fleet.statistics import add_up
from dynamo.protos.inference_pb2 import InferStatistics, ModelStatistics, ModelStatisticsResponse, StatisticDuration


def test_sums_that_do_not_fit_end_at_the_largest_number() -> None:
    most = (1 << 64) - 1
    duration = InferStatistics(success=StatisticDuration(count=most, ns=1))
    part = ModelStatisticsResponse(
        model_stats=[ModelStatistics(name="m", version="1", inference_count=most, inference_stats=duration)]
    )
    [total] = add_up([part, part]).model_stats
    assert (total.inference_count, total.inference_stats.success.count, total.inference_stats.success.ns) == (most, most, 2)
