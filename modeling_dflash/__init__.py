"""Train, evaluate and run DFlash block-diffusion drafters (arXiv 2602.06036) on Hugging Face Transformers."""

from dflash_hf.configuration_dflash import DFlashConfig, build_target_layer_ids, create_drafter_config
from dflash_hf.generation_dflash import DFlashCandidateGenerator
from dflash_hf.initialization_dflash import create_drafter
from dflash_hf.modeling_dflash import DFlashDraftModel
from dflash_hf.outputs_dflash import DFlashGenerateOutput
from dflash_hf.tree_dflash import TokenTree

__version__ = "0.1.0"

__all__ = [
    "DFlashCandidateGenerator",
    "DFlashConfig",
    "DFlashDraftModel",
    "DFlashGenerateOutput",
    "TokenTree",
    "build_target_layer_ids",
    "create_drafter",
    "create_drafter_config",
]
