"""A tiny model is what Transformers loads, with a tokenizer of one token per character and word."""

from pathlib import Path

from transformers import AutoModelForCausalLM, AutoTokenizer

from megatron_gspo.tools.make_tiny_model import TinyModel, write_tiny_model

WORD = "Spell this:"


def test_the_model_loads_and_the_seed_decides_its_weights(tmp_path: Path):
    size = TinyModel(hidden=32, layers=2, experts=4, expert_width=16)
    seeds = {"a": 0, "b": 0, "c": 1}
    counts = [
        write_tiny_model(tmp_path / name, size, words=[WORD], seed=seed)
        for name, seed in seeds.items()
    ]
    models = [AutoModelForCausalLM.from_pretrained(tmp_path / name) for name in "abc"]
    assert counts == [sum(p.numel() for p in model.parameters()) for model in models]
    states = [model.state_dict() for model in models]
    assert all(states[0][name].equal(tensor) for name, tensor in states[1].items())
    assert not all(states[0][name].equal(tensor) for name, tensor in states[2].items())
    assert models[0].config.vocab_size >= len(AutoTokenizer.from_pretrained(tmp_path / "a"))
