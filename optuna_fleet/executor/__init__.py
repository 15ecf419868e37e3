"""Running trials: the facade, the controller that decides, the driver that carries out."""
