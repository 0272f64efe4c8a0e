//! The variables by which programs find the authorities that they trust.

/// What programs call the file of authorities that replaces their own: all of Mozilla's and ours.
pub const BUNDLE_VARIABLES: [&str; 8] = [
    "SSL_CERT_FILE",                    // OpenSSL and what is built on it, Go, rustls-native-certs
    "REQUESTS_CA_BUNDLE",               // Python requests
    "CURL_CA_BUNDLE",                   // curl
    "PIP_CERT",                         // pip
    "GIT_SSL_CAINFO",                   // git
    "AWS_CA_BUNDLE",                    // AWS CLI and boto3
    "GRPC_DEFAULT_SSL_ROOTS_FILE_PATH", // gRPC in C++, Python, Ruby
    "CARGO_HTTP_CAINFO",                // cargo
];
/// What programs call the file of authorities that they take besides their own.
pub const EXTRA_VARIABLES: [&str; 2] = [
    "NODE_EXTRA_CA_CERTS", // Node
    "DENO_CERT",           // Deno
];
