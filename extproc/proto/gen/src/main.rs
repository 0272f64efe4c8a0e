//! Regenerates the vendored protobuf code: `main OUT_DIR`. Pure Rust, no protoc.
//!
//! Envoy's .proto tree is the one inside the `envoy-types` crate, which this tool depends on for its files
//! only; ours is `../proto`.

use std::path::{Path, PathBuf};
use std::process::Command;

use anyhow::{Context, Result};

/// What is generated, with everything it imports.
const ROOTS: [&str; 4] = [
    "envoy/service/ext_proc/v3/external_processor.proto",
    "envoy/service/discovery/v3/ads.proto",
    "envoy/extensions/transport_sockets/tls/v3/secret.proto",
    "sallyport/discovery/v1alpha1/discovery.proto",
];

/// Files that only carry annotations: nothing generated here reads them.
const DROPPED: [&str; 5] =
    ["validate/", "udpa/", "xds/annotations", "envoy/annotations", "google/protobuf/descriptor"];

/// Fields that are handed on without a copy from the HTTP/2 frame they came in, and to the one they leave in.
const BYTES: [&str; 6] = [
    "envoy.service.ext_proc.v3.HttpBody.body",
    "envoy.service.ext_proc.v3.StreamedBodyResponse.body",
    "envoy.service.ext_proc.v3.BodyMutation.body",
    "envoy.service.ext_proc.v3.ImmediateResponse.body",
    "envoy.config.core.v3.HeaderValue.raw_value",
    "sallyport.discovery.v1alpha1.Part.content",
];

/// What the generator calls discovery's codec, and what it is.
const CODEC: (&str, &str) = ("tonic_prost::ProstCodec", "crate::codec::Resting");

fn main() -> Result<()> {
    let out: PathBuf = std::env::args_os().nth(1).context("usage: sallyport-proto-gen OUT_DIR")?.into();
    let protos = proto_tree()?;
    let includes = ["data-plane-api", "xds", "googleapis", "protoc-gen-validate"].map(|d| protos.join(d));
    let ours = Path::new(env!("CARGO_MANIFEST_DIR")).join("../proto");
    let mut files = protox::compile(ROOTS, includes.into_iter().chain([ours]))?;
    files.file.retain(|f| !DROPPED.iter().any(|d| f.name().starts_with(d)));
    for file in &mut files.file {
        // Envoy's comments are reStructuredText; as rustdoc they are thousands of lines of broken links.
        if !file.name().starts_with("sallyport/") {
            file.source_code_info = None;
        }
    }
    std::fs::create_dir_all(&out)?;
    let mut config = prost_build::Config::new();
    config.bytes(BYTES);
    tonic_prost_build::configure()
        .build_server(true)
        .build_client(true)
        .build_transport(false)
        .out_dir(&out)
        .include_file("mod.rs")
        .compile_fds_with_config(files, config)?;
    // Only one service has another codec, and the generator takes one for all.
    let discovery = out.join("sallyport.discovery.v1alpha1.rs");
    let code = std::fs::read_to_string(&discovery)?;
    anyhow::ensure!(code.contains(CODEC.0), "{} is not in the generated code", CODEC.0);
    std::fs::write(&discovery, code.replace(CODEC.0, CODEC.1))?;
    Ok(())
}

/// Where cargo put the sources of `envoy-types`.
fn proto_tree() -> Result<PathBuf> {
    let manifest = Path::new(env!("CARGO_MANIFEST_DIR")).join("Cargo.toml");
    let cargo = std::env::var_os("CARGO").unwrap_or_else(|| "cargo".into());
    let output = Command::new(cargo)
        .args(["metadata", "--locked", "--format-version=1", "--manifest-path"])
        .arg(manifest)
        .output()
        .context("can't run cargo metadata")?;
    anyhow::ensure!(output.status.success(), "cargo metadata: {}", String::from_utf8_lossy(&output.stderr));
    let metadata: serde_json::Value = serde_json::from_slice(&output.stdout)?;
    let path = metadata["packages"]
        .as_array()
        .into_iter()
        .flatten()
        .find(|p| p["name"] == "envoy-types")
        .and_then(|p| p["manifest_path"].as_str())
        .context("envoy-types is not among the dependencies")?;
    Ok(Path::new(path).parent().context("a manifest has a directory")?.join("proto"))
}
