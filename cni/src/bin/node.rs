//! The daemon on every node.
#![forbid(unsafe_code)]

fn main() -> std::process::ExitCode {
    sallyport_cni::node::main()
}
