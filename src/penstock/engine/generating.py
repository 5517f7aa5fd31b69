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
        """Answers to the prompts, in their order.

        Ranks of one pipeline give the same prompts and parameters, and all get the result.
        A token depends on the seed, its prompt, the number of its sample and its position, not on what else is
        generated nor on how. Where pipelines share experts (ep > 1) all of them call it together.

        Args:
            prompts: the token ids of each.
            params: `SamplingParams` for all prompts, or one for each; left out, the defaults.
            options: how to generate, as `GenerateOptions`.
            on_token: called with the answer's number in the result and each new token, on the rank of the first stage
                (like the next two; where there are several stages, in a thread beside the one that computes). If it
                returns true, that answer ends.
            on_answer: called with the answer's number and each answer as soon as it has ended.
            interrupt: asked between tokens; once it returns true, the call ends with the answers as they are, and
                `Engine.resume` can go on with them.

        Raises:
            ValueError: prompts or parameters are impossible; on all ranks alike, before anything is computed.
            PipelineError: ranks of one pipeline were given different ones.
            StepError: on all ranks, when one has failed, in a listener for example; generation is possible again.
            TransportError: a peer did not send or receive in time.
        """
        listeners = Listeners(on_token, on_answer, interrupt)
        return self.generator.generate(prompts, params, options or GenerateOptions(), listeners)

    def resume(self, keep_caches: bool = False) -> GenerateResult:
        """Go on with the call of `generate` that was interrupted last, with the weights as they are now.

        Prompts and tokens so far are read again with these weights, so the next tokens are those of a generation that
        begins there. `keep_caches` keeps what older weights made of them, and costs nothing. Random numbers, listeners
        and options go on in either case; each token bears the version of the weights it was drawn from.

        Raises: PipelineError if there is no such call, and all that `Engine.generate` raises.
        """
        return self.generator.resume(keep_caches)

    def release_caches(self) -> None:
        """Free the memory that generation keeps for its next call."""
        self.generator.release()
