import logging

import pytest

from tts_stack.training import ScheduleConfig


@pytest.mark.parametrize(("max_steps", "warns"), [(200, True), (201, False)])
def test_a_warm_up_longer_than_the_training_is_told(caplog, max_steps, warns):
    with caplog.at_level(logging.WARNING):
        ScheduleConfig("cosine", 200).warn_when_never_warm(max_steps)
    found = "warmup_steps is 200, the training has 200 steps: the learning rate never reaches"
    assert (found in caplog.text) is warns
