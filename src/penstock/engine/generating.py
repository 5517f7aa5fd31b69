"""The engine's face for generation: prompts in, answers out."""

from collections.abc import Sequence

from penstock.engine.answers import GenerateOptions, GenerateResult
from penstock.engine.generator import Generator, OnAnswer, OnToken
from penstock.settings import SamplingParams


class Generating:
    """Answers prompts with the weights as they are."""

    #: continues prompts
    generator: Generator

    def generate(
        self,
        prompts: Sequence[Sequence[int]],
        params: SamplingParams | Sequence[SamplingParams] | None = None,
        options: GenerateOptions | None = None,
        on_token: OnToken | None = None,
        on_answer: OnAnswer | None = None,
    ) -> GenerateResult:
        """Answers to the prompts (token ids), in their order; see `Generator.generate`."""
        return self.generator.generate(prompts, params, options or GenerateOptions(), on_token, on_answer)

    def release_caches(self) -> None:
        """Free the memory that generation keeps for its next call."""
        self.generator.release()
