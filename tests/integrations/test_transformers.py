"""A Trainer on a fleet trains as the plain one does, wherever the trial is."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F

transformers = pytest.importorskip("transformers")
datasets = pytest.importorskip("datasets")

from tokenizers import Tokenizer  # noqa: E402
from tokenizers.models import WordLevel  # noqa: E402
from transformers import (  # noqa: E402
    BertConfig,
    BertForSequenceClassification,
    DataCollatorWithPadding,
    EarlyStoppingCallback,
    GPT2Config,
    GPT2LMHeadModel,
    PreTrainedTokenizerFast,
    Trainer,
    TrainingArguments,
)

from optuna_fleet import SharedPipeline  # noqa: E402
from optuna_fleet.exceptions import FleetConfigError  # noqa: E402
from optuna_fleet.integrations.transformers import (  # noqa: E402
    FleetTrainer,
    FleetTrainerMixin,
    PruningCallback,
)
from tests.fleets import Leg, fleet_of  # noqa: E402
from tests.integrations.harness import (  # noqa: E402
    ALONE,
    OFTEN_MOVED,
    QUIET,
    WIDE,
    are_cleared,
    close_to,
    flown,
    frees_its_devices_when_pruned,
)
from tests.nursery import preloading  # noqa: E402

pytestmark = QUIET

EPOCHS, BATCH_SIZE = 3, 8
PRELOADED = {each.__module__ for each in (Trainer, BertForSequenceClassification, GPT2LMHeadModel)}
WORDS = ["[PAD]", "[UNK]", *(f"w{number}" for number in range(30))]


def sentences(size: int, seed: int) -> Any:
    """Of unlike lengths; a sentence's label is told by its first word."""
    generator = np.random.default_rng(seed)
    ids = [generator.integers(2, len(WORDS), generator.integers(2, 9)) for _ in range(size)]
    return datasets.Dataset.from_dict(
        {
            "input_ids": [each.tolist() for each in ids],
            "attention_mask": [[1] * len(each) for each in ids],
            "label": [int(each[0]) % 3 for each in ids],
            "length": [len(each) for each in ids],  # no input of the model
        }
    )


def padding() -> Any:
    words = Tokenizer(WordLevel({word: n for n, word in enumerate(WORDS)}, unk_token="[UNK]"))
    return DataCollatorWithPadding(
        PreTrainedTokenizerFast(tokenizer_object=words, pad_token="[PAD]", unk_token="[UNK]")
    )


def for_language_models(samples: list[dict[str, Any]]) -> dict[str, torch.Tensor]:
    """Pads; labels are as many as there are words, so batches and shares of them weigh unlike."""
    fields = [{key: each[key] for key in ("input_ids", "attention_mask")} for each in samples]
    batch = dict(padding()(fields))
    batch["labels"] = batch["input_ids"].masked_fill(batch["attention_mask"] == 0, -100)
    return batch


def bert(dropout: float = 0.0) -> Any:
    config = BertConfig(
        vocab_size=len(WORDS),
        hidden_size=8,
        num_hidden_layers=1,
        num_attention_heads=2,
        intermediate_size=8,
        max_position_embeddings=16,
        num_labels=3,
        hidden_dropout_prob=dropout,
        attention_probs_dropout_prob=dropout,
    )
    return BertForSequenceClassification(config)


def classifier() -> Any:
    torch.manual_seed(0)
    return bert().double()


def language_model() -> Any:
    torch.manual_seed(0)
    config = GPT2Config(
        vocab_size=len(WORDS),
        n_embd=8,
        n_layer=1,
        n_head=2,
        n_positions=16,
        bos_token_id=0,
        eos_token_id=0,
        resid_pdrop=0.0,
        embd_pdrop=0.0,
        attn_pdrop=0.0,
    )
    model = GPT2LMHeadModel(config).double()
    model.loss_function = in_float64
    return model


def in_float64(logits: Any, labels: Any, num_items_in_batch: Any = None, **_: Any) -> Any:
    """As that of Transformers, which is in float32."""
    losses = F.cross_entropy(logits[:, :-1].mT, labels[:, 1:], reduction="none")
    count = (labels[:, 1:] != -100).sum() if num_items_in_batch is None else num_items_in_batch
    return losses.sum() / count


def arguments(folder: str | Path, **more: Any) -> Any:
    options = {
        "output_dir": str(folder),
        "num_train_epochs": EPOCHS,
        "per_device_train_batch_size": BATCH_SIZE,
        "per_device_eval_batch_size": BATCH_SIZE,
        "learning_rate": 0.01,
        "lr_scheduler_type": "linear",
        "warmup_steps": 3,
        "weight_decay": 0.1,
        "eval_strategy": "epoch",
        "logging_steps": 4,  # not at the ends of epochs
        "metric_for_best_model": "eval_loss",
        "use_cpu": True,
        "disable_tqdm": True,
        "report_to": "none",
        "seed": 7,
    }
    return TrainingArguments(**{**options, **more})


def accuracy(predicted: Any) -> dict[str, float]:
    """Depends on the order of the samples, too."""
    right = predicted.predictions.argmax(-1) == predicted.label_ids
    return {"accuracy": right.mean(), "place": float(right @ np.arange(len(right)))}


KINDS: dict[str, Any] = {
    # Evaluated in batches that some of three devices have no sample of.
    "classifier": (
        classifier,
        "",
        {"compute_metrics": accuracy},
        {"per_device_eval_batch_size": 2},
    ),
    "language model": (language_model, "_lm", {}, {"gradient_accumulation_steps": 2}),
}


def seen_by(trainer: Any, output: Any) -> dict[str, Any]:
    """All numbers that a user would look at."""
    timed = ("runtime", "per_second", "flos")
    history = [
        {name: value for name, value in entry.items() if not any(t in name for t in timed)}
        for entry in trainer.state.log_history
    ]
    assert abs(output.training_loss - history[-1]["train_loss"]) == 0
    return {"history": history, "steps": trainer.state.global_step}


def objective_of(kind: str, folder: Path, trainer_class: Any = FleetTrainer, **more: Any) -> Any:
    model, suffix, options, settings = KINDS[kind]

    def objective(trial: Any) -> float:
        transformers.logging.set_verbosity_error()
        trainer = trainer_class(
            trial,
            model=model(),
            args=arguments(folder, **{**settings, **more}),
            train_dataset="train" + suffix,
            eval_dataset="val" + suffix,
            callbacks=[PruningCallback(trial), EarlyStoppingCallback(2)],
            **options,
        )
        output = trainer.train()
        trial.set_user_attr("seen", seen_by(trainer, output))
        return trainer.evaluate()["eval_loss"]

    return objective


@pytest.fixture(scope="module", autouse=True)
def one_thread() -> Iterator[None]:
    """Here and in trials: bit for bit the same are sums in equal numbers of threads only."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="module")
def pipeline() -> Any:
    sets = {"train": sentences(41, 0), "val": sentences(17, 1)}
    return SharedPipeline(
        **sets,
        **{f"{name}_lm": dataset for name, dataset in sets.items()},
        collate_fn={
            **dict.fromkeys(sets, padding()),
            **{f"{name}_lm": for_language_models for name in sets},
        },
    )


@pytest.fixture(scope="module")
def three(pipeline: Any) -> Iterator[Any]:
    with preloading(*PRELOADED), fleet_of(devices=3, pipeline=pipeline) as fleet:
        yield fleet


class InOrder:
    """The epochs of the pipeline, for a Trainer without a fleet."""

    def __init__(self, pipeline: Any, name: str) -> None:
        self._client, self._name, self._epoch = pipeline.inline(), name, 0

    def set_epoch(self, epoch: int) -> None:
        self._epoch = epoch

    def _read(self) -> Any:
        return self._client.read(
            self._name,
            epoch=self._epoch,
            batch_size=BATCH_SIZE,
            rank=0,
            world_size=1,
            drop_last=False,
        )

    def __len__(self) -> int:
        return len(self._read())

    def __iter__(self) -> Any:
        return (
            {name: value for name, value in batch.data.items() if name != "length"}
            for batch in self._read()
        )


def plain(kind: str, pipeline: Any, folder: Path) -> dict[str, Any]:
    """What the same Trainer does by itself."""
    model, suffix, options, settings = KINDS[kind]

    class Plain(Trainer):
        def get_train_dataloader(self) -> Any:
            return InOrder(pipeline, "train" + suffix)

    trainer = Plain(
        model=model(),
        args=arguments(folder, save_strategy="no", **settings),
        train_dataset=sentences(41, 0),
        eval_dataset=sentences(17, 1),
        data_collator=for_language_models if suffix else padding(),
        callbacks=[EarlyStoppingCallback(2)],
        **options,
    )
    seen = seen_by(trainer, trainer.train())
    gc.collect()
    return seen


def compare(seen: dict[str, Any], wanted: dict[str, Any], tolerance: float) -> None:
    assert seen["steps"] == wanted["steps"]
    assert len(seen["history"]) == len(wanted["history"])
    for one, other in zip(seen["history"], wanted["history"], strict=True):
        assert one.keys() == other.keys()
        for name, value in one.items():
            # Trainer adds up training losses in float32.
            within = 1e-6 if name in ("loss", "train_loss") and tolerance else tolerance
            assert value == pytest.approx(other[name], rel=within, abs=0), name


@pytest.mark.parametrize("kind", list(KINDS))
def test_the_same_as_plain_on_any_devices(
    kind: str, three: Any, pipeline: Any, tmp_path: Path
) -> None:
    wanted = plain(kind, pipeline, tmp_path / "plain")
    objective = objective_of(kind, tmp_path / "fleet")
    alone = flown(three, objective, ALONE)
    compare(alone.user_attrs["seen"], wanted, 0)
    evaluated = [e["eval_loss"] for e in wanted["history"] if "eval_loss" in e]
    assert list(alone.intermediate_values.values()) == evaluated
    for legs in (WIDE, OFTEN_MOVED):
        trial = flown(three, objective, legs)
        compare(trial.user_attrs["seen"], wanted, 1e-10)
        assert trial.value == close_to(alone.value)


def in_float32(trial: Any) -> float:
    """As most write it, dropout and all."""
    trainer = FleetTrainer(
        trial,
        model=bert(dropout=0.1),
        args=TrainingArguments(
            output_dir="unused",
            learning_rate=trial.suggest_float("lr", 1e-5, 1e-3, log=True),
            num_train_epochs=10,
            per_device_train_batch_size=BATCH_SIZE,
            eval_strategy="epoch",
            report_to="none",
            use_cpu=True,
        ),
        train_dataset="train",
        eval_dataset="val",
        compute_metrics=accuracy,
        callbacks=[PruningCallback(trial, "eval_accuracy")],
    )
    trainer.train()
    return trainer.evaluate()["eval_accuracy"]


def test_the_check_clears_it(pipeline: Any, tmp_path: Path) -> None:
    are_cleared(pipeline, in_float32, objective_of("language model", tmp_path))


class Weighted(Trainer):
    """As users write it: class weights, so the loss is no mean over the samples."""

    def compute_loss(
        self,
        model: Any,
        inputs: Any,
        return_outputs: bool = False,
        num_items_in_batch: Any = None,
    ) -> Any:
        labels = inputs.pop("labels")
        outputs = model(**inputs)
        weights = torch.tensor([1.0, 2.0, 4.0], dtype=torch.float64)
        loss = F.cross_entropy(outputs.logits, labels, weight=weights)
        self.weight = weights[labels].sum()
        return (loss, outputs) if return_outputs else loss


class OnFleet(FleetTrainerMixin, Weighted):
    def weighted(self, loss: torch.Tensor, num_items: Any) -> torch.Tensor:
        return self.fleet_trial.weighted(loss, self.weight)


def test_a_trainer_class_of_ones_own_with_weights_of_its_own(three: Any, tmp_path: Path) -> None:
    told = objective_of("classifier", tmp_path, OnFleet)
    alone, wide = (flown(three, told, legs) for legs in (ALONE, WIDE))
    assert wide.value != alone.value  # as `eval_loss` is the mean of the shares'
    one, other = (trial.user_attrs["seen"]["history"] for trial in (alone, wide))
    norms = [[e["grad_norm"] for e in history if "grad_norm" in e] for history in (one, other)]
    assert norms[1] == close_to(norms[0])


def test_a_pruned_trial_frees_its_devices(three: Any, tmp_path: Path) -> None:
    frees_its_devices_when_pruned(three, objective_of("classifier", tmp_path))


class Counts(transformers.TrainerCallback):  # type: ignore[misc]
    """Which processes say that they are the first; how many epochs there were."""

    epochs = 0

    def on_epoch_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        assert state.is_world_process_zero == (args.process_index == 0) == args.should_save
        self.epochs += 1


def test_the_rest_of_a_trainer(three: Any, tmp_path: Path) -> None:
    """Several data sets, predictions, `max_steps`, two Trainers in a row, saving on rank 0."""

    def objective(trial: Any) -> float:
        transformers.logging.set_verbosity_error()
        first = FleetTrainer(
            trial,
            model_init=classifier,
            args=arguments(tmp_path / "first", max_steps=7, metric_for_best_model="eval_two_loss"),
            train_dataset="train",
            eval_dataset={"one": "val", "two": "train"},
            compute_metrics=accuracy,
            callbacks=[counts := Counts(), PruningCallback(trial, "eval_two_loss")],
        )
        first.train()
        predicted = first.predict("val")
        first.save_model(str(tmp_path / "saved"))
        second = FleetTrainer(
            trial,
            model=classifier(),
            args=arguments(tmp_path / "second", num_train_epochs=2, eval_strategy="no"),
            train_dataset="train",
            eval_dataset="val",
        )
        second.evaluate()
        second.train()
        trial.set_user_attr("epochs", counts.epochs)
        trial.set_user_attr("predicted", predicted.predictions.tolist())
        seen = {
            "labels": predicted.label_ids.tolist(),
            "place": first.evaluate()["eval_one_place"],
            "steps": [first.state.global_step, second.state.global_step],
        }
        trial.set_user_attr("seen", seen)
        return second.evaluate()["eval_loss"]

    alone = flown(three, objective, ALONE)
    seen = alone.user_attrs["seen"]
    assert seen["steps"] == [7, 12]
    assert seen["labels"] == sentences(17, 1)["label"]
    assert alone.user_attrs["epochs"] == 2
    # An epoch has 6 steps: one that is cut short is reported as one.
    assert list(alone.intermediate_values) == [0, 1]
    saved = BertForSequenceClassification.from_pretrained(tmp_path / "saved")
    assert saved.config.num_labels == 3
    assert list((tmp_path / "second").iterdir()) == []  # no checkpoints
    for legs in (WIDE, [Leg((1,), 2), Leg((0, 2))]):
        trial = flown(three, objective, legs)
        assert trial.user_attrs["seen"] == seen
        assert trial.value == close_to(alone.value)
        predicted = [each.user_attrs["predicted"] for each in (trial, alone)]
        np.testing.assert_allclose(*predicted, rtol=1e-8)


@pytest.mark.parametrize(
    ("options", "settings", "message"),
    [
        ({"data_collator": len}, {}, r"SharedPipeline\(..., collate_fn=...\)"),
        ({"train_dataset": [1]}, {}, "`train_dataset` is a `list`, but must be the name"),
        ({}, {"load_best_model_at_end": True, "save_strategy": "epoch"}, "`load_best_model_at_"),
        ({"monitor": "eval_lost"}, {}, "was to report 'eval_lost', but"),
    ],
)
def test_what_can_not_be_is_told_of(
    three: Any, tmp_path: Path, options: Any, settings: Any, message: str
) -> None:
    def objective(trial: Any) -> None:
        given = {"train_dataset": "train", "eval_dataset": "val", **options}
        callbacks = [PruningCallback(trial, given.pop("monitor", "eval_loss"))]
        args = arguments(tmp_path, num_train_epochs=1, **settings)
        FleetTrainer(trial, model=classifier(), args=args, callbacks=callbacks, **given).train()

    with pytest.raises(FleetConfigError, match=message):
        flown(three, objective, ALONE)
