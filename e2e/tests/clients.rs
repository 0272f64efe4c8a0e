//! Real programs through `sallyport up`, told of it by nothing but the variables of its file `env`.
//!
//! curl and Python must be there (`make` needs them too). Node, Go, Java and git are tried where they are
//! installed; what is left out is printed.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic, reason = "a test fails by panicking")]

use std::io::{BufRead as _, BufReader, Read as _};
use std::net::TcpListener;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use sallyport_e2e::rig::{envoy_binary, workspace_binary};
use sallyport_e2e::tls::Authority;
use sallyport_e2e::upstream::{Upstream, fake_key};
use serde_json::Value;
use tempfile::TempDir;

/// A compiler may have to run first.
const DEADLINE: Duration = Duration::from_secs(300);

const POLICY: &str = "
apiVersion: sallyport.dev/v1alpha1
kind: AgentPolicy
metadata: {name: clients}
spec:
  egress: {default: Deny, rules: [{hosts: [localhost], action: Allow}]}
";

/// `sallyport up` before an upstream that speaks TLS.
struct Guarded {
    upstream: Upstream,
    env: PathBuf,
    dir: TempDir,
    child: Child,
}

impl Guarded {
    fn start() -> Self {
        let authority = Authority::default();
        let upstream = Upstream::start_tls(authority.server(&["localhost"])).unwrap();
        let dir = tempfile::Builder::new().prefix("sp").tempdir().unwrap();
        std::fs::write(dir.path().join("p.yaml"), POLICY).unwrap();
        std::fs::write(dir.path().join("upstream-ca.pem"), &authority.pem).unwrap();
        let port = TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap().port();
        let mut child = Command::new(workspace_binary("sallyport", "SALLYPORT"))
            .args(["up", "-f", "p.yaml", "--log", "json", "--proxy-port", &port.to_string()])
            .args(["--run-dir", "run", "--authority", "authority", "--ca-bundle", "upstream-ca.pem"])
            .env("SALLYPORT_ENVOY", envoy_binary().canonicalize().unwrap())
            .current_dir(dir.path())
            .stdin(Stdio::null())
            .stdout(Stdio::piped())
            .stderr(Stdio::inherit())
            .spawn()
            .unwrap();
        let mut lines = BufReader::new(child.stdout.take().unwrap()).lines();
        let env = loop {
            let line: Value = serde_json::from_str(&lines.next().expect("a line").unwrap()).unwrap();
            if line["event"] == "ready" {
                break PathBuf::from(line["env"].as_str().expect("the file for shells"));
            }
        };
        // Whoever does not read on would stop the writer.
        std::thread::spawn(move || lines.for_each(drop));
        Self { upstream, env, dir, child }
    }

    /// Runs a shell's words with the variables: whether they ended well, and what they printed.
    fn run(&self, words: &str) -> (bool, String) {
        let mut child = Command::new("sh")
            .args(["-c", &format!(". \"$ENV_FILE\" && {words}")])
            .env("ENV_FILE", &self.env)
            .env("URL", self.upstream.url(""))
            .env("KEY", fake_key())
            .env_remove("no_proxy")
            .env_remove("NO_PROXY")
            .current_dir(self.dir.path())
            .stdin(Stdio::null())
            .stdout(Stdio::piped())
            .stderr(Stdio::piped())
            .spawn()
            .unwrap();
        let end = Instant::now() + DEADLINE;
        while child.try_wait().unwrap().is_none() {
            if Instant::now() > end {
                let _ = child.kill();
                panic!("`{words}` did not end");
            }
            std::thread::sleep(Duration::from_millis(20));
        }
        let (mut said, mut wrong) = (String::new(), String::new());
        child.stdout.take().unwrap().read_to_string(&mut said).unwrap();
        child.stderr.take().unwrap().read_to_string(&mut wrong).unwrap();
        (child.wait().unwrap().success(), said + &wrong)
    }

    fn file(&self, name: &str, text: &str) {
        std::fs::write(self.dir.path().join(name), text).unwrap();
    }
}

impl Drop for Guarded {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

fn installed(program: &str) -> bool {
    let path = std::env::var_os("PATH").unwrap_or_default();
    let found = std::env::split_paths(&path).any(|dir| Path::new(&dir).join(program).is_file());
    if !found {
        eprintln!("left out: {program} is not installed");
    }
    found
}

/// What each program does: a call that passes, and one with a key in it that does not. Prints both statuses.
fn both(guarded: &Guarded, words: &str) {
    let before = guarded.upstream.seen.requests("/echo");
    let (ok, said) = guarded.run(words);
    assert!(ok && said.contains("200 403"), "{words}:\n{said}");
    assert_eq!(guarded.upstream.seen.requests("/echo"), before + 1, "{words}");
}

#[test]
fn curl_is_inspected_over_both_versions_of_http() {
    let guarded = Guarded::start();
    for version in ["--http1.1", "--http2"] {
        both(
            &guarded,
            &format!(
                "curl -sS {version} -o /dev/null -w '%{{http_code}} ' -d hello $URL/echo && \
                 curl -sS {version} -o /dev/null -w '%{{http_code}}' -d \"key $KEY\" $URL/echo"
            ),
        );
    }
    // Nothing but the bundle makes it trust the connection.
    let (ok, said) =
        guarded.run("CURL_CA_BUNDLE=upstream-ca.pem SSL_CERT_FILE=upstream-ca.pem curl -sS $URL/echo");
    assert!(!ok && said.contains("certificate"), "{said}");
}

#[test]
fn python_is_inspected() {
    let guarded = Guarded::start();
    guarded.file(
        "c.py",
        "import os, urllib.request, urllib.error\n\
         def call(body):\n\
         \x20   try: return urllib.request.urlopen(os.environ['URL'] + '/echo', body).status\n\
         \x20   except urllib.error.HTTPError as e: return e.code\n\
         print(call(b'hello'), call(('key ' + os.environ['KEY']).encode()))\n",
    );
    both(&guarded, "python3 c.py");
}

#[test]
fn node_is_inspected() {
    if !installed("node") {
        return;
    }
    let guarded = Guarded::start();
    // `fetch` asks a proxy from Node 22.21 on; a tunnel by hand works in all of them.
    guarded.file(
        "c.js",
        "const http = require('http'), tls = require('tls');\n\
         const proxy = new URL(process.env.https_proxy), to = new URL(process.env.URL);\n\
         const call = body => new Promise((done, fail) => {\n\
           http.request({host: proxy.hostname, port: proxy.port, method: 'CONNECT', path: to.host})\n\
             .on('connect', (_, socket) => {\n\
               const wire = tls.connect({socket, servername: to.hostname}, () => {\n\
                 wire.write(`POST /echo HTTP/1.1\\r\\nhost: ${to.host}\\r\\nconnection: close\\r\\ncontent-length: ${body.length}\\r\\n\\r\\n${body}`);\n\
               }).on('error', fail);\n\
               let text = ''; wire.on('data', d => text += d).on('close', () => done(text.split(' ')[1]));\n\
             }).on('error', fail).end();\n\
         });\n\
         call('hello').then(a => call('key ' + process.env.KEY).then(b => console.log(a, b)));\n",
    );
    both(&guarded, "node c.js");
}

#[test]
fn go_is_inspected() {
    if !installed("go") {
        return;
    }
    let guarded = Guarded::start();
    // Go takes no proxy for localhost from its environment, so the client is told.
    guarded.file(
        "c.go",
        "package main\n\
         import (\"fmt\"; \"net/http\"; \"net/url\"; \"os\"; \"strings\")\n\
         func main() {\n\
           proxy, _ := url.Parse(os.Getenv(\"https_proxy\"))\n\
           client := &http.Client{Transport: &http.Transport{Proxy: http.ProxyURL(proxy), ForceAttemptHTTP2: true}}\n\
           call := func(body string) int {\n\
             r, e := client.Post(os.Getenv(\"URL\")+\"/echo\", \"text/plain\", strings.NewReader(body))\n\
             if e != nil { panic(e) }\n\
             r.Body.Close(); return r.StatusCode }\n\
           fmt.Println(call(\"hello\"), call(\"key \"+os.Getenv(\"KEY\")))\n\
         }\n",
    );
    both(&guarded, "env -u http_proxy -u HTTP_PROXY GOFLAGS=-mod=mod GOTOOLCHAIN=local go run c.go");
}

#[test]
fn java_is_inspected() {
    if !installed("java") || !installed("keytool") {
        return;
    }
    let guarded = Guarded::start();
    guarded.file(
        "C.java",
        "import java.net.*; import java.net.http.*;\n\
         public class C { public static void main(String[] a) throws Exception {\n\
           URI proxy = URI.create(System.getenv(\"https_proxy\"));\n\
           HttpClient client = HttpClient.newBuilder()\n\
             .proxy(ProxySelector.of(new InetSocketAddress(proxy.getHost(), proxy.getPort()))).build();\n\
           String said = \"\";\n\
           for (String body : new String[] {\"hello\", \"key \" + System.getenv(\"KEY\")}) {\n\
             HttpRequest r = HttpRequest.newBuilder(URI.create(System.getenv(\"URL\") + \"/echo\"))\n\
               .POST(HttpRequest.BodyPublishers.ofString(body)).build();\n\
             said += client.send(r, HttpResponse.BodyHandlers.ofString()).statusCode() + \" \"; }\n\
           System.out.println(said); } }\n",
    );
    both(
        &guarded,
        "keytool -importcert -noprompt -file authority/ca.pem -keystore t.p12 -storetype PKCS12 -storepass changeit && \
         java -Djavax.net.ssl.trustStore=t.p12 -Djavax.net.ssl.trustStorePassword=changeit C.java",
    );
}

#[test]
fn git_is_inspected() {
    if !installed("git") {
        return;
    }
    let guarded = Guarded::start();
    // The upstream is no repository: that git asked it, and was answered, is what matters.
    let (ok, said) = guarded.run("git ls-remote $URL/some.git");
    assert!(!ok && !said.contains("certificate"), "{said}");
    assert_eq!(guarded.upstream.seen.requests("/some.git/info/refs"), 1, "{said}");
}
