"""Models of transformers: found, loaded, adapted, and made to share prefixes."""

from typing import TYPE_CHECKING

from gspo.system import face

if TYPE_CHECKING:
    # fmt: off
    from gspo.models import cache, embedded, find, gguf, lessons, moe
    from gspo.models.cache import SUMS, quiet
    from gspo.models.embedded import RECIPES
    from gspo.models.find import (
        EMBEDDED, FETCHED, fetched_folder, find_here, hub_cache, hub_problem, is_hub_name, locate, nearest_model,
        snapshot,
    )
    from gspo.models.flex import FLEX
    from gspo.models.folder import (
        absurd, check_settings, check_values, check_weights, read_adapter, read_settings, refuse_other_vocabulary,
    )
    from gspo.models.loading import (
        end_tokens, find_padding_by_place, load_model, load_tokenizer, open_folder, policy_class, read_weights,
        refuse_foreign_vocabulary,
    )
    from gspo.models.lora import (
        adaptable_layers, adapter_off, add_adapter, expert_tensors, merged_state, save_adapter, write_adapter,
    )
    from gspo.models.moe import (
        RouteRecorder, UNKNOWN, check_replay, num_experts, padded_routes, recomputing, route_shape, routed, routers,
        routes_mismatch,
    )
    from gspo.models.tree import TREE, TreeLayout, current_layout, use_attention
    from gspo.models.vision.parts import freeze_vision, text_modules, vision_of, vision_parameters
    from gspo.models.vision.processor import Processor, load_processor, thumbnail
    from gspo.models.vision.tower import Place, Placement, Vision
    # fmt: on

__getattr__ = face(__name__)
