"""The capture format. The only place that imports h5py."""
