// Writes the version of the toolkit that compiled the fat binary, such as 13000, to `version`.
// To load and launch it shows that this driver takes what this toolkit makes.
extern "C" __global__ void kvburst_toolkit_version(int* version) { *version = CUDART_VERSION; }
