from __future__ import annotations

import pytest
import torch
from torch._dynamo.utils import counters

from flashnorm.bench.e2e.contender import CHECKED
from flashnorm.bench.e2e.correctness import Judge
from flashnorm.bench.e2e.recipe import RecipeLayer, RecipeModel
from flashnorm.bench.e2e.recipe_steps import RecipeSteps, require_graphs, skipped_graphs
from flashnorm.bench.e2e.rows import RECIPE, Row
from flashnorm.errors import CheckFailed, Unsupported
from flashnorm.runtime.decode.program import Program
from flashnorm.runtime.decode.reading import read_spec
from tests.runtime.decode.models import LENGTH, tiny, tokens

ROWS, PROMPT = 3, 20
# fp32 throughout: two orders of the same additions; logits are sums of some hundred products, three layers deep.
CLOSE = 1e-5


def prompts() -> torch.Tensor:
    return torch.tensor([tokens(PROMPT, seed=row) for row in range(ROWS)])


def steps(model: torch.nn.Module) -> RecipeSteps:
    return RecipeSteps(model, Row("tiny", "tiny", (), context=PROMPT + 16, tokens=8), prompts(), compiled=False)


@pytest.mark.parametrize(("name", "changes"), [("llama", {}), ("llama", {"tie_word_embeddings": True}), ("qwen3", {})])
@torch.no_grad()
def test_every_steps_logits_are_the_stock_models(name, changes):
    model = tiny(name, **changes)
    trace = steps(model).trace()
    expected = model(trace.ids, use_cache=False).logits[:, -CHECKED:]
    assert trace.logits.shape == expected.shape == (ROWS, CHECKED, 101)
    for step in range(CHECKED):
        assert (trace.logits[:, step] - expected[:, step]).norm() <= CLOSE * expected[:, step].norm()
    assert torch.equal(trace.chosen, expected.argmax(-1))


def _mask_that_sees_one_further(recipe: RecipeModel) -> None:
    recipe.places -= 1


def _mask_that_misses_the_token_itself(recipe: RecipeModel) -> None:
    recipe.places += 1
    recipe.places[0] = 0


def _rotation_of_the_next_position(recipe: RecipeModel) -> None:
    recipe.cos.copy_(recipe.cos.roll(1, 0))


def _a_lost_key(recipe: RecipeModel) -> None:
    def lose(layer: RecipeLayer, *_: object) -> None:
        layer.keys[:, :, 5] = 0

    recipe.layers[0].register_forward_hook(lose)


def _a_gain_left_out(recipe: RecipeModel) -> None:
    recipe.layers[1].before_mlp = torch.ones_like(recipe.layers[1].before_mlp)


@pytest.mark.parametrize(
    "fault",
    [
        _mask_that_sees_one_further,
        _mask_that_misses_the_token_itself,
        _rotation_of_the_next_position,
        _a_lost_key,
        _a_gain_left_out,
    ],
)
def test_a_planted_fault_is_seen(fault):
    model = tiny("llama", torch.bfloat16)
    judge = Judge(model)
    contender = steps(model)
    judge.judge(RECIPE, contender.trace(), own=False)
    fault(contender._model)
    with pytest.raises(CheckFailed, match=r"gpt-fast recipe is wrong: its logits are .* times as far"):
        judge.judge(RECIPE, contender.trace(), own=False)


def test_a_run_follows_a_run():
    contender = steps(tiny("qwen3"))
    first = contender.trace()
    assert contender.run() > 0
    assert torch.equal(contender.trace().logits, first.logits)


@pytest.mark.parametrize("beside_a_program", [False, True])
def test_no_weight_is_copied(beside_a_program):
    model = tiny("llama")
    before = model(prompts()).logits
    program = Program(read_spec(model, max_length=LENGTH), slots=1) if beside_a_program else None
    recipe = RecipeModel(model, 1, LENGTH)
    held = {p.untyped_storage().data_ptr() for p in model.parameters()}
    own = {"cos", "sin", "places", "keys", "values"}
    for name, buffer in recipe.named_buffers():
        assert (buffer.untyped_storage().data_ptr() in held) == (name.rpartition(".")[2] not in own), name
    assert torch.equal(model(prompts()).logits, before)
    if program is not None:
        program.close()


def test_a_step_without_cuda_graphs_is_not_the_recipe(monkeypatch):
    before = skipped_graphs()
    require_graphs(before)
    monkeypatch.setitem(counters["inductor"], "cudagraph_skips", before + 1)
    with pytest.raises(CheckFailed, match="left CUDA graphs out"):
        require_graphs(before)


def test_biases_are_refused():
    with pytest.raises(Unsupported, match="linears with a bias"):
        RecipeModel(tiny("llama_tied"), 1, LENGTH)


def test_the_step_is_one_graph_that_is_compiled_once():
    """Whole, as `fullgraph` demands, and once for all positions."""
    model = tiny("qwen3")
    recipe = RecipeModel(model, ROWS, LENGTH)
    compiled: list[torch.fx.GraphModule] = []

    def backend(graph: torch.fx.GraphModule, _inputs: object) -> object:
        compiled.append(graph)
        return graph.forward

    step = torch.compile(recipe, backend=backend, fullgraph=True, dynamic=False)
    with torch.no_grad():
        for position in range(3):
            step(torch.full((ROWS, 1), 7), torch.tensor([position]))
    torch.compiler.reset()
    assert len(compiled) == 1
