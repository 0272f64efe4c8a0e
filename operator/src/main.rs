//! The operator's process.

fn main() -> std::process::ExitCode {
    sallyport_operator::main()
}
