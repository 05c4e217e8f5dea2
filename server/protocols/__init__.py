"""What clients speak: the Open Inference Protocol and /v1/predict, over one data plane."""
