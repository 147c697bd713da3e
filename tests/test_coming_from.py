"""What the guide for users of other libraries shows runs, and none of their operations is left out."""

from pathlib import Path

import pytest
from mktestdocs import check_md_file

GUIDE = Path(__file__).parents[1] / "tutorials" / "coming_from.md"


# TorchRL's environments and losses warn about options of their own that are to change.
@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning")
def test_python_blocks_run_one_after_another():
    check_md_file(GUIDE, memory=True)


@pytest.mark.parametrize(
    "name",
    [
        *("HerReplayStorage", "NStepReplayStorage", "create_factory", "insert_transition"),
        *("num_workers", "pin_memory", "fetch_every", "save_snapshot", "replay_iter"),
        *("insert_data_slice", "get_data_slice", "get_all_buffer_data", "generate_batches"),
        *("before_gradients", "after_gradients", "get_priority", "get_sequence_priority"),
        *("update_storage_parameter", "update_eta", "reset()", "add_transition", "add_episode"),
        *("add_path", "sample_path", "sample_transitions", "clear", "n_transitions_stored", "full"),
        *("HERReplayBuffer", "model_class", "HindsightExperienceReplayWrapper", "can_sample"),
        *("GoalSelectionStrategy", "HERGoalEnvWrapper", "convert_dict_to_obs"),
        "convert_obs_to_dict",
    ],
)
def test_each_operation_is_in_the_table_and_in_a_section(name):
    table, *sections = GUIDE.read_text().split("\n## ")

    assert name in table
    assert any(name in section for section in sections)
