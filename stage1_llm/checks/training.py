"""The training task of a setup, for the checks that train."""

from stage1_llm.checks.setup import NUM_COMPARED, Setup
from stage1_llm.module import LLMTask
from stage1_llm.network import TextToSemantic
from tts_stack.training import make_fabric


def make_task(setup: Setup, network: TextToSemantic, kind: type[LLMTask] = LLMTask) -> LLMTask:
    """What `tts-stack train-llm` would run, on the samples of the setup."""
    return kind(
        network,
        setup.samples,
        [sample.length for sample in setup.samples],
        setup.samples[:NUM_COMPARED],
        setup.contract.tokens,
        setup.contract.prompt,
        setup.config,
        make_fabric(setup.config.trainer),
    )


def take_steps(task: LLMTask, num_steps: int) -> None:
    """Train from the beginning."""
    for step, batch in enumerate(task.batches(0, num_steps)):
        task.train_step(batch, step)
