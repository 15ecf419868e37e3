"""A Trainer on a fleet trains as the plain one does, wherever the trial is."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import optuna
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

from optuna_fleet import FleetExecutor, SharedPipeline  # noqa: E402
from optuna_fleet.exceptions import FleetConfigError  # noqa: E402
from optuna_fleet.integrations.transformers import (  # noqa: E402
    FleetTrainer,
    FleetTrainerMixin,
    PruningCallback,
)
from tests.fleets import Leg, fleet_of  # noqa: E402
from tests.nursery import preloading  # noqa: E402

pytestmark = [
    pytest.mark.filterwarnings(f"ignore::{kind}") for kind in ("UserWarning", "FutureWarning")
]

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


def tokenizer() -> Any:
    words = Tokenizer(WordLevel({word: n for n, word in enumerate(WORDS)}, unk_token="[UNK]"))
    return PreTrainedTokenizerFast(tokenizer_object=words, pad_token="[PAD]", unk_token="[UNK]")


def for_language_models(samples: list[dict[str, Any]]) -> dict[str, torch.Tensor]:
    """Pads; labels are as many as there are words, so batches and shares of them weigh unlike."""
    fields = [{key: each[key] for key in ("input_ids", "attention_mask")} for each in samples]
    batch = dict(DataCollatorWithPadding(tokenizer())(fields))
    batch["labels"] = batch["input_ids"].masked_fill(batch["attention_mask"] == 0, -100)
    return batch


def classifier() -> Any:
    torch.manual_seed(0)
    config = BertConfig(
        vocab_size=len(WORDS),
        hidden_size=8,
        num_hidden_layers=1,
        num_attention_heads=2,
        intermediate_size=8,
        max_position_embeddings=16,
        num_labels=3,
        hidden_dropout_prob=0.0,
        attention_probs_dropout_prob=0.0,
    )
    return BertForSequenceClassification(config).double()


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


def arguments(folder: str, **more: Any) -> Any:
    options = {
        "output_dir": folder,
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
            args=arguments(str(folder), **{**settings, **more}),
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
    padding = DataCollatorWithPadding(tokenizer())
    train, val = sentences(41, 0), sentences(17, 1)
    return SharedPipeline(
        train=train,
        val=val,
        train_lm=train,
        val_lm=val,
        collate_fn={
            "train": padding,
            "val": padding,
            "train_lm": for_language_models,
            "val_lm": for_language_models,
        },
    )


@pytest.fixture(scope="module")
def three(pipeline: Any) -> Iterator[Any]:
    with preloading(*PRELOADED), fleet_of(devices=3, pipeline=pipeline) as fleet:
        yield fleet


def flown(fleet: Any, objective: Any, *legs: Leg, **options: Any) -> optuna.trial.FrozenTrial:
    fleet.script = {0: list(legs)}
    study = optuna.create_study(**options)
    study.optimize(objective, n_trials=1, executor=fleet)
    return study.trials[0]


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
        args=arguments(str(folder), save_strategy="no", **settings),
        train_dataset=sentences(41, 0),
        eval_dataset=sentences(17, 1),
        data_collator=for_language_models if suffix else DataCollatorWithPadding(tokenizer()),
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
    alone = flown(three, objective, Leg((0,)))
    compare(alone.user_attrs["seen"], wanted, 0)
    evaluated = [e["eval_loss"] for e in wanted["history"] if "eval_loss" in e]
    assert list(alone.intermediate_values.values()) == evaluated
    for legs in (
        [Leg((0, 1))],
        [Leg((0, 1, 2))],
        [Leg((0, 1, 2), 1), Leg((2,), 2), Leg((1, 0))],
    ):
        trial = flown(three, objective, *legs)
        compare(trial.user_attrs["seen"], wanted, 1e-10)
        assert trial.value == pytest.approx(alone.value, rel=1e-10)


def in_float32(trial: Any) -> float:
    """As most write it, dropout and all."""
    trainer = FleetTrainer(
        trial,
        model=BertForSequenceClassification(
            BertConfig(
                vocab_size=len(WORDS),
                hidden_size=8,
                num_hidden_layers=1,
                num_attention_heads=2,
                intermediate_size=8,
                max_position_embeddings=16,
                num_labels=3,
            )
        ),
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


@pytest.mark.parametrize("kind", ["in_float32", *KINDS])
def test_the_check_clears_it(pipeline: Any, tmp_path: Path, kind: str) -> None:
    objective = objective_of(kind, tmp_path) if kind in KINDS else in_float32
    report = FleetExecutor(pipeline, devices=2).preflight(optuna.create_study(), objective)
    assert report.may_widen, report
    assert report.may_move, report


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
    alone, wide = (flown(three, told, Leg(devices)) for devices in [(0,), (0, 1, 2)])
    assert wide.value != alone.value  # as `eval_loss` is the mean of the shares'
    one, other = (trial.user_attrs["seen"]["history"] for trial in (alone, wide))
    norms = [[e["grad_norm"] for e in history if "grad_norm" in e] for history in (one, other)]
    assert norms[1] == pytest.approx(norms[0], rel=1e-10)


def test_a_pruned_trial_frees_its_devices(three: Any, tmp_path: Path) -> None:
    class AtOnce(optuna.pruners.BasePruner):
        def prune(self, study: optuna.Study, trial: optuna.trial.FrozenTrial) -> bool:
            return trial.last_step == 1

    objective = objective_of("classifier", tmp_path)
    trial = flown(three, objective, Leg((0, 1)), pruner=AtOnce())
    assert trial.state is optuna.trial.TrialState.PRUNED
    assert list(trial.intermediate_values) == [0, 1]
    assert flown(three, objective, Leg((0, 1, 2))).state is optuna.trial.TrialState.COMPLETE


class Counts(transformers.TrainerCallback):  # type: ignore[misc]
    """Which processes say that they are the first; what is done of each kind."""

    def __init__(self) -> None:
        self.counts: dict[str, int] = {}

    def on_epoch_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        assert state.is_world_process_zero == (args.process_index == 0) == args.should_save
        self.counts["epochs"] = self.counts.get("epochs", 0) + 1


def test_the_rest_of_a_trainer(three: Any, tmp_path: Path) -> None:
    """Several data sets, predictions, `max_steps`, two Trainers in a row, saving on rank 0."""

    def objective(trial: Any) -> float:
        transformers.logging.set_verbosity_error()
        first = FleetTrainer(
            trial,
            model_init=classifier,
            args=arguments(
                str(tmp_path / "first"),
                max_steps=7,
                metric_for_best_model="eval_two_loss",
            ),
            train_dataset="train",
            eval_dataset={"one": "val", "two": "train"},
            compute_metrics=accuracy,
            callbacks=[counts := Counts(), PruningCallback(trial, "eval_two_loss")],
        )
        first.train()
        predicted = first.predict("val")
        trial.set_user_attr("predicted", predicted.predictions.tolist())
        trial.set_user_attr("labels", predicted.label_ids.tolist())
        trial.set_user_attr("place", first.evaluate()["eval_one_place"])
        trial.set_user_attr("epochs", counts.counts.get("epochs", 0))
        first.save_model(str(tmp_path / "saved"))
        second = FleetTrainer(
            trial,
            model=classifier(),
            args=arguments(str(tmp_path / "second"), num_train_epochs=2, eval_strategy="no"),
            train_dataset="train",
            eval_dataset="val",
        )
        second.evaluate()
        second.train()
        trial.set_user_attr("steps", [first.state.global_step, second.state.global_step])
        return second.evaluate()["eval_loss"]

    alone = flown(three, objective, Leg((0,)))
    assert alone.user_attrs["steps"] == [7, 12]
    assert alone.user_attrs["epochs"] == 2
    assert alone.user_attrs["labels"] == sentences(17, 1)["label"]
    saved = BertForSequenceClassification.from_pretrained(tmp_path / "saved")
    assert saved.config.num_labels == 3
    assert list((tmp_path / "second").iterdir()) == []  # no checkpoints
    for legs in ([Leg((0, 1, 2))], [Leg((1,), 2), Leg((0, 2))]):
        trial = flown(three, objective, *legs)
        for name in ("steps", "labels", "place"):
            assert trial.user_attrs[name] == alone.user_attrs[name], name
        assert trial.value == pytest.approx(alone.value, rel=1e-10)
        np.testing.assert_allclose(
            trial.user_attrs["predicted"], alone.user_attrs["predicted"], rtol=1e-8
        )


@pytest.mark.parametrize(
    ("options", "settings", "message"),
    [
        ({"data_collator": len}, {}, r"SharedPipeline\(..., collate_fn=...\)"),
        ({"train_dataset": [1]}, {}, "`train_dataset` is a `list`, but must be the name"),
        ({}, {"load_best_model_at_end": True, "save_strategy": "epoch"}, "`load_best_model_at_"),
        ({}, {"train_sampling_strategy": "group_by_length"}, "the order is SharedPipeline"),
        ({"callbacks": "eval_lost"}, {}, "was to report 'eval_lost', but"),
    ],
)
def test_what_can_not_be_is_told_of(
    three: Any, tmp_path: Path, options: Any, settings: Any, message: str
) -> None:
    def objective(trial: Any) -> None:
        given = {"train_dataset": "train", "eval_dataset": "val", **options}
        if "callbacks" in options:
            given["callbacks"] = [PruningCallback(trial, options["callbacks"])]
        args = arguments(str(tmp_path), num_train_epochs=1, **settings)
        FleetTrainer(trial, model=classifier(), args=args, **given).train()

    with pytest.raises(FleetConfigError, match=message):
        flown(three, objective, Leg((0,)))


@pytest.mark.parametrize(("max_steps", "reports"), [(2, [0]), (7, [0, 1])])  # an epoch has 6
def test_an_epoch_that_is_cut_short_is_reported_as_one(
    three: Any, tmp_path: Path, max_steps: int, reports: list[int]
) -> None:
    trial = flown(three, objective_of("classifier", tmp_path, max_steps=max_steps), Leg((0,)))
    assert list(trial.intermediate_values) == reports


def test_plain_optuna_is_told_of() -> None:
    with pytest.raises(FleetConfigError, match="given a `FixedTrial`"):
        FleetTrainer(optuna.trial.FixedTrial({}))
