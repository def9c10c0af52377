"""Facts about CIFAR-10 and CIFAR-100 (A. Krizhevsky, 2009): archives, checksums, classes and statistics."""

from dataclasses import dataclass, field
from typing import NamedTuple

from attnconv.data.download import Remote

_CIFAR10 = ("airplane", "automobile", "bird", "cat", "deer", "dog", "frog", "horse", "ship", "truck")

_FINE = (
    "apple aquarium_fish baby bear beaver bed bee beetle bicycle bottle bowl boy bridge bus butterfly camel can "
    "castle caterpillar cattle chair chimpanzee clock cloud cockroach couch crab crocodile cup dinosaur dolphin "
    "elephant flatfish forest fox girl hamster house kangaroo keyboard lamp lawn_mower leopard lion lizard lobster "
    "man maple_tree motorcycle mountain mouse mushroom oak_tree orange orchid otter palm_tree pear pickup_truck "
    "pine_tree plain plate poppy porcupine possum rabbit raccoon ray road rocket rose sea seal shark shrew skunk "
    "skyscraper snail snake spider squirrel streetcar sunflower sweet_pepper table tank telephone television tiger "
    "tractor train trout tulip turtle wardrobe whale willow_tree wolf woman worm"
)
_COARSE = (
    "aquatic_mammals fish flowers food_containers fruit_and_vegetables household_electrical_devices "
    "household_furniture insects large_carnivores large_man-made_outdoor_things large_natural_outdoor_scenes "
    "large_omnivores_and_herbivores medium_mammals non-insect_invertebrates people reptiles small_mammals trees "
    "vehicles_1 vehicles_2"
)


class Labels(NamedTuple):
    """One kind of labels: its column in parquet files (in the pickles: with an s), and the classes."""

    column: str
    classes: tuple[str, ...]


@dataclass(frozen=True)
class Cifar:
    """Facts about one of the two data sets.

    `train` and `test` hold the MD5 of each pickle by its name, in order; `labels` are by the value of the setting. The
    paper divided by `paper_std`: the mean over images of each image's own deviation.
    """

    title: str
    archive: Remote
    folder: str
    train: dict[str, str]
    test: dict[str, str]
    labels: dict[str, Labels]
    mean: tuple[float, ...]
    std: tuple[float, ...]
    paper_std: tuple[float, ...] | None = None
    rows: dict[str, int] = field(default_factory=lambda: {"train": 50_000, "test": 10_000})


_HOME = "https://www.cs.toronto.edu/~kriz/"

CIFARS = {
    "cifar10": Cifar(
        title="CIFAR-10",
        archive=Remote(
            f"{_HOME}cifar-10-python.tar.gz",
            170_498_071,
            "6d958be074577803d12ecdefd02955f39262c83c16fe9348329d7fe0b5c001ce",
        ),
        folder="cifar-10-batches-py",
        train={
            "data_batch_1": "c99cafc152244af753f735de768cd75f",
            "data_batch_2": "d4bba439e000b95fd0a9bffe97cbabec",
            "data_batch_3": "54ebc095f3ab1f0389bbae665268c751",
            "data_batch_4": "634d18415352ddfa80567beed471001a",
            "data_batch_5": "482c414d41f54cd18b22e5b47cb7c3cb",
        },
        test={"test_batch": "40351d587109b95175f43aff81a1287e"},
        labels={"fine": Labels("label", _CIFAR10)},
        mean=(0.4914, 0.4822, 0.4465),
        std=(0.2470, 0.2435, 0.2616),
        paper_std=(0.2023, 0.1994, 0.2010),
    ),
    "cifar100": Cifar(
        title="CIFAR-100",
        archive=Remote(
            f"{_HOME}cifar-100-python.tar.gz",
            169_001_437,
            "85cd44d02ba6437773c5bbd22e183051d648de2e7d6b014e1ef29b855ba677a7",
        ),
        folder="cifar-100-python",
        train={"train": "16019d7e3df5f24257cddd939b257f8d"},
        test={"test": "f0ef6b0ae62326f3e7ffdfab6717acfc"},
        labels={
            "fine": Labels("fine_label", tuple(_FINE.split())),
            "coarse": Labels("coarse_label", tuple(_COARSE.split())),
        },
        mean=(0.5071, 0.4865, 0.4409),
        std=(0.2673, 0.2564, 0.2762),
    ),
}
