"""A pre-trained model and real sequences for `run`: AntiBERTy, and V genes of T-cell receptors.

Both come out of wheels of PyPI, whose versions and SHA-256 are pinned here. They are downloaded, not committed:

- `antiberty` 0.1.3, MIT licence: the weights of a BERT with 26 million parameters, trained on 558 million antibody
  sequences (J. A. Ruffolo, J. J. Gray, J. Sulam, *Deciphering antibody affinity maturation with language models
  and weakly supervised learning*, arXiv:2112.07782).
- `anarci` 2026.2.13.2, BSD 3-clause licence: germline genes of antibodies and of T-cell receptors, translated and
  aligned, from IMGT (J. Dunbar, C. M. Deane, *ANARCI: antigen receptor numbering and receptor classification*,
  Bioinformatics 32, 2016; M.-P. Lefranc et al., *IMGT, the international ImMunoGeneTics information system 25
  years on*, Nucleic Acids Research 43, 2015).

T-cell receptors have the fold of antibodies, but none was among the sequences that the model was trained on.
Nothing that is downloaded is run: the weights are read with `weights_only=True`, the genes as a literal.
"""

from __future__ import annotations

import ast
import hashlib
import io
import json
import random
import re
import subprocess
import sys
import tempfile
import warnings
import zipfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from fitact.base import UsageError
from fitact.runtime.measure import imported

FOLDER = Path(__file__).parents[2] / "build" / "evidence"
CHECKPOINT = "antiberty/trained_models/AntiBERTy_md_smooth/"
VOCABULARY = ("[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", *"ACDEFGHIKLMNPQRSTVWY")  # of the checkpoint, in order
INDEX = {token: i for i, token in enumerate(VOCABULARY)}
RESIDUES = INDEX["A"]  # the first token that is one
UNUSED = re.compile(r"bert\.pooler\.|cls\.(species|chain|graft)\.|bert\.embeddings\.position_ids$")  # other heads
IGNORED = -100  # a label that does not count
HELD_OUT = 5  # every fifth family is held out
Batch = tuple[Tensor, Tensor, Tensor]  # tokens, which of them are not padding, labels


@dataclass(frozen=True)
class Wheel:
    """A file on PyPI.

    Attributes:
        name, version: of the package.
        sha256: of the wheel.

    """

    name: str
    version: str
    sha256: str

    @property
    def file(self) -> str:
        """Return the file's name."""
        return f"{self.name}-{self.version}-py3-none-any.whl"


ANTIBERTY = Wheel("antiberty", "0.1.3", "30d910992b190013871bac49cdc032e01a19339f7d2b958ab99b0eb44638352a")
ANARCI = Wheel("anarci", "2026.2.13.2", "8f88d49857abc2c5427c6cc903ebdac7b35e6636635eaa9d60bd8f0d4e7d14b7")


@dataclass(frozen=True)
class Genes:
    """Sequences of amino acids, one letter each; no family of genes is in both lists."""

    training: list[str]
    held_out: list[str]


def fetch(wheel: Wheel, folder: Path = FOLDER) -> Path:
    """Return the path of a wheel, which pip downloads if it is not there.

    Raises:
        UsageError: pip cannot download it, or it is not the file that is expected.

    """
    path = folder / wheel.file
    if not path.exists():
        print(f"downloading {wheel.file}", file=sys.stderr)
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=folder) as unfinished:
            options = ["--quiet", "--no-deps", "--only-binary=:all:", "--dest", unfinished]
            wanted = f"{wheel.name}=={wheel.version}"
            done = subprocess.run([sys.executable, "-m", "pip", "download", *options, wanted], check=False)
            if done.returncode or not (Path(unfinished) / wheel.file).exists():
                raise UsageError(f"pip download {wanted}: expected {wheel.file}, and got none: try again later")
            (Path(unfinished) / wheel.file).replace(path)
    digest = hashlib.sha256(path.read_bytes()).hexdigest()
    if digest != wheel.sha256:
        raise UsageError(f"{path}: expected SHA-256 {wheel.sha256}, got {digest}: remove it")
    return path


def pretrained(path: Path) -> nn.Module:
    """Return transformers' BertForMaskedLM with the weights of a wheel of AntiBERTy, in float32.

    Dropout is off. Heads for other tasks are left out.

    Raises:
        UsageError: the weights are not tensors alone, or not those of this model.

    """
    with zipfile.ZipFile(path) as wheel:
        config = json.loads(wheel.read(f"{CHECKPOINT}config.json"))
        tokens = tuple(wheel.read("antiberty/trained_models/vocab.txt").decode().split())
        data = wheel.read(f"{CHECKPOINT}pytorch_model.bin")
    if tokens != VOCABULARY:
        raise UsageError(f"{path}: expected the tokens {' '.join(VOCABULARY)}, got {' '.join(tokens)}")
    try:
        weights: dict[str, Tensor] = torch.load(io.BytesIO(data), map_location="cpu", weights_only=True)
    except Exception as error:
        raise UsageError(f"{path}: expected a checkpoint of tensors alone: {error}") from None
    return with_weights(bert(config), weights)


def bert(config: dict[str, Any]) -> nn.Module:
    """Return transformers' BertForMaskedLM of a configuration, without dropout, with random weights."""
    transformers = imported("transformers")
    off = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
    model: nn.Module = transformers.BertForMaskedLM(transformers.BertConfig(**{**config, **off}))
    return model


def with_weights(model: nn.Module, weights: dict[str, Tensor]) -> nn.Module:
    """Return the model with these weights; UsageError if some are missing, or nobody knows what they are."""
    loaded = model.load_state_dict(weights, strict=False)
    strange = [name for name in loaded.unexpected_keys if not UNUSED.match(name)]
    if loaded.missing_keys or strange:
        wrong = ", ".join([*loaded.missing_keys, *strange])
        raise UsageError(f"expected the weights of {type(model).__name__}, these are missing or too many: {wrong}")
    return model


def add_adapters(model: nn.Module, rank: int, seed: int) -> nn.Module:
    """Return the model with LoRA on all linear layers but the last, which alone is trained."""
    peft = imported("peft")
    torch.manual_seed(seed)
    config = peft.LoraConfig(r=rank, lora_alpha=2 * rank, lora_dropout=0.0, target_modules="all-linear")
    with warnings.catch_warnings():
        warnings.filterwarnings(
            "ignore", "`is_gradient_checkpointing` is deprecated", FutureWarning
        )  # peft reads it
        adapted: nn.Module = peft.get_peft_model(model, config)
    return adapted


def receptors(path: Path) -> dict[str, str]:
    """Return the V genes of human and mouse T-cell receptors in a wheel of ANARCI: allele → amino acids.

    The file is Python that assigns one literal. It is parsed, not run.
    """
    with zipfile.ZipFile(path) as wheel:
        source = wheel.read("anarci/germlines.py").decode()
    (statement,) = ast.parse(source).body
    assert isinstance(statement, ast.Assign)
    genes = ast.literal_eval(statement.value)["V"]
    return {
        f"{species} {name}": aligned.replace("-", "")
        for chain in "ABGD"
        for species, alleles in genes[chain].items()
        for name, aligned in alleles.items()
    }


def split(alleles: dict[str, str]) -> Genes:
    """Hold out every HELD_OUT-th family, in a fixed random order, in all species; nothing is in a list twice.

    The family of TRAV12-3*01 is TRAV12. Alleles and neighbouring genes are nearly alike, so families stay whole.
    """
    families: dict[str, set[str]] = {}
    for name, sequence in alleles.items():
        family = re.search(r"TR[ABGD]V\d+", name)
        if family is None or set(sequence) - set(VOCABULARY):
            raise UsageError(f"{name}: expected a V gene of a T-cell receptor, got {sequence!r}")
        families.setdefault(family[0], set()).add(sequence)
    names = sorted(families)
    random.Random(0).shuffle(names)
    held_out = {sequence for name in names[::HELD_OUT] for sequence in families[name]}
    return Genes(sorted(set(alleles.values()) - held_out), sorted(held_out))


def evenly(sequences: Sequence[str], count: int) -> list[str]:
    """Return so many sequences, evenly spaced, or all if they are fewer."""
    count = min(count, len(sequences))
    return [sequences[i * len(sequences) // count] for i in range(count)]


def masked(sequences: Sequence[str], share: float, generator: torch.Generator) -> Batch:
    """Return a batch of which each residue is masked with probability `share`, below 1, and at least one is.

    Returns:
        Tokens and which of them are not padding, (sequences, longest + 2) of int64; labels of the same shape,
        the token that was there, or IGNORED where nothing is masked.

    """
    rows = [[INDEX["[CLS]"], *map(INDEX.__getitem__, sequence), INDEX["[SEP]"]] for sequence in sequences]
    tokens = nn.utils.rnn.pad_sequence([torch.tensor(row) for row in rows], batch_first=True)
    places = torch.rand(tokens.shape, generator=generator).masked_fill(tokens < RESIDUES, 1.0)
    chosen = places <= max(share, float(places.min()))
    return (
        tokens.masked_fill(chosen, INDEX["[MASK]"]),
        (tokens != INDEX["[PAD]"]).long(),
        tokens.masked_fill(~chosen, IGNORED),
    )
