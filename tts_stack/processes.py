"""Which of several processes of one training this is, from what their launcher says.

Free of heavy imports, so that the command line can ask before anything is loaded.
"""

import os

# Set by torchrun, by Lightning's own launcher and by SLURM's srun.
_RANK_VARIABLES = ("RANK", "GROUP_RANK", "LOCAL_RANK", "NODE_RANK", "SLURM_PROCID")


def is_main_process() -> bool:
    """Whether this process writes files, logs and shows progress; a process alone always does."""
    return all(os.environ.get(name, "0") == "0" for name in _RANK_VARIABLES)


def num_started_processes() -> int | None:
    """Processes that torchrun or srun started side by side; None without such a launcher."""
    if "TORCHELASTIC_RUN_ID" in os.environ:
        return int(os.environ["WORLD_SIZE"])
    steps = os.environ.get("SLURM_STEP_NUM_TASKS") if "SLURM_PROCID" in os.environ else None
    return int(steps) if steps else None
