"""A worker extension of the tests: its methods write into the parameters of a running engine's model."""

from __future__ import annotations


class WeightMethods:
    def scale_weights(self, factor: float, fails_on: int | None = None) -> None:
        """Scale some parameters of each layer; one rank raises in the middle of it."""
        named = self.model_runner.get_model().named_parameters()
        # Of linear layers there is a packed copy, which counts.
        chosen = [parameter for name, parameter in named if "input_layernorm" in name]
        for number, parameter in enumerate(chosen):
            if number and self.rank == fails_on:
                raise RuntimeError("as the test asked")
            parameter.data.mul_(factor)

    def turn_positions(self) -> None:
        """Negate the sines of the positions: a buffer that no checkpoint has."""
        for name, buffer in self.model_runner.get_model().named_buffers():
            if name.endswith("cos_sin_cache"):
                buffer[:, buffer.shape[1] // 2 :].neg_()
