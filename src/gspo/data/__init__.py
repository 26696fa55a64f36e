"""Prompts from files, hub data sets and procedural tasks: loading, rendering, splitting and order."""

from typing import TYPE_CHECKING

from gspo.system import face

if TYPE_CHECKING:
    # fmt: off
    from gspo.data import arithmetic, digits
    from gspo.data.arithmetic import Split
    from gspo.data.columns import owner_of
    from gspo.data.reference import final_answer
    from gspo.data.curriculum import Curriculum
    from gspo.data.files import read_parquet
    from gspo.data.dataset import DataSettings, Dataset, load_dataset, make_dataset
    from gspo.data.mixture import DATA_TYPES, Data, Mixture, distinct_names, make_mixture
    from gspo.data.sources import default_reward, divide, is_on_hub
    # fmt: on

__getattr__ = face(__name__)
