"""What the ports for vision share: scanned digits, enlarged, shifted and turned a little."""

from sklearn.datasets import load_digits
from sklearn.model_selection import train_test_split
from torch.utils.data import Dataset
from torchvision.transforms import v2


class Digits(Dataset):
    def __init__(self, images, labels, transform):
        self.images = images
        self.labels = labels
        self.transform = transform

    def __len__(self):
        return len(self.labels)

    def __getitem__(self, index):
        return self.transform(self.images[index] / 16), int(self.labels[index])


def load_datasets():
    """Return the training set (1437 digits of 16 x 16 pixels) and the held-out set (360)."""
    digits = load_digits()
    train_x, val_x, train_y, val_y = train_test_split(
        digits.images.astype("float32"),
        digits.target,
        test_size=360,
        random_state=0,
        stratify=digits.target,
    )
    enlarge = [v2.ToImage(), v2.Resize(16, antialias=True)]
    shake = v2.RandomAffine(degrees=10, translate=(0.08, 0.08), scale=(0.9, 1.1))
    return (
        Digits(train_x, train_y, v2.Compose([*enlarge, shake])),
        Digits(val_x, val_y, v2.Compose(enlarge)),
    )
