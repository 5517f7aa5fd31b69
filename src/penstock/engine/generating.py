"""The engine's face for generation: prompts in, answers out."""

from collections.abc import Sequence

from penstock.engine.answers import GenerateOptions, GenerateResult
from penstock.engine.generator import Generator
from penstock.engine.listeners import Interrupt, Listeners, OnAnswer, OnToken
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
        interrupt: Interrupt | None = None,
    ) -> GenerateResult:
        """Answers to the prompts (token ids), in their order; see `Generator.generate`.

        `interrupt()` is asked between tokens, on the rank of the first stage; once it returns true, the call ends
        with the answers as they are, and `resume` can go on with them.
        """
        listeners = Listeners(on_token, on_answer, interrupt)
        return self.generator.generate(prompts, params, options or GenerateOptions(), listeners)

    def resume(self, keep_caches: bool = False) -> GenerateResult:
        """Go on with the call of `generate` that was interrupted last, with the weights as they are now.

        Prompts and tokens so far are read again with these weights, so the next tokens are those of a generation that
        begins there. `keep_caches` keeps what older weights made of them, and costs nothing. Random numbers, listeners
        and options go on in either case; each token bears the version of the weights it was drawn from.

        Raises: PipelineError if there is no such call, and all that `generate` raises.
        """
        return self.generator.resume(keep_caches)

    def release_caches(self) -> None:
        """Free the memory that generation keeps for its next call."""
        self.generator.release()
