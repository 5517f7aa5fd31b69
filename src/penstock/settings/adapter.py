"""Settings of LoRA adapters."""

from dataclasses import dataclass

from penstock.settings.declare import ABOVE_0, AT_LEAST_1, Bounds, Settings, setting

_KEEPS_SOME = Bounds(least=0, below=1, otherwise="keeps nothing")


@dataclass(frozen=True)
class AdapterConfig(Settings, section="adapter"):
    """LoRA adapters, trained in place of the model's own weights.

    Source: arXiv 2106.09685, section 4.1. Scaling by the root of the rank: arXiv 2312.03732.
    """

    rank: int | None = setting(None, "Rank of the adapters (LoRA); left out, the model itself is trained.", AT_LEAST_1)
    alpha: float = setting(16.0, "Adapters' outputs are scaled by this number, divided by the rank.", ABOVE_0)
    dropout: float = setting(0.0, "Dropout of the adapters' inputs.", _KEEPS_SOME)
    target_modules: tuple[str, ...] = setting(
        ("q_proj", "v_proj"), "The linear layers that get an adapter, by their ends of names in transformers."
    )
    rank_stabilised: bool = setting(False, "Divide by the root of the rank instead.")
    pretrained: str | None = setting(None, "A folder in peft's format whose adapters the run begins with.")

    @property
    def is_used(self) -> bool:
        return self.rank is not None or self.pretrained is not None
